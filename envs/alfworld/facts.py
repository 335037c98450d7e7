"""Statistics of ALFRED's rooms, objects and goals, for the game generator.

The tables hold, for each object type, its properties and the receptacle types
that can contain it; and, for each room type, the numbers of receptacles, the
frequencies of objects and the frequencies of goals. ALFRED has 30 rooms of each
type.
"""

ROOMS = ('kitchen', 'living', 'bedroom', 'bathroom')

_GROUPS = {
  'table': 'CoffeeTable CounterTop DiningTable SideTable',
  'seat': 'ArmChair Ottoman Sofa',
  'bureau': 'Desk Dresser',
  'bath': 'BathtubBasin SinkBasin',
}
_FLAGS = {
  'c': 'cleanable',
  'h': 'heatable',
  'k': 'coolable',
  's': 'sliceable',
  'r': 'isReceptacleObject',
}

# Object type -> (keys of _FLAGS, receptacle types that can contain it).
_OBJECTS = {
  'AlarmClock': ('', 'table bureau Shelf'),
  'Apple': ('chks', 'table Fridge GarbageCan Microwave SinkBasin'),
  'BaseballBat': ('', 'table Bed'),
  'BasketBall': ('', 'table seat bureau Bed'),
  'Book': ('', 'table seat bureau Bed Cabinet Drawer Shelf'),
  'Bowl': ('ckr', 'table bureau Cabinet Fridge Microwave Shelf SinkBasin'),
  'Box': ('r', 'table seat bureau Cabinet Shelf'),
  'Bread': ('hks', 'table Fridge GarbageCan Microwave'),
  'ButterKnife': ('c', 'table Drawer SinkBasin'),
  'CD': ('', 'table bureau Cabinet Drawer GarbageCan Safe Shelf'),
  'Candle': ('', 'table bureau Cabinet Cart Drawer Shelf Toilet'),
  'CellPhone': ('', 'table seat bureau Bed Drawer Safe Shelf'),
  'Cloth': (
    'c',
    'table seat bureau bath Cabinet Cart Drawer GarbageCan LaundryHamper '
    'Shelf Toilet',
  ),
  'CreditCard': ('', 'table seat bureau Drawer Safe Shelf'),
  'Cup': ('chkr', 'table bureau Cabinet Fridge Microwave Shelf SinkBasin'),
  'DishSponge': (
    'c',
    'table BathtubBasin Cabinet Cart Drawer GarbageCan Shelf SinkBasin Toilet',
  ),
  'Egg': ('chks', 'table Fridge GarbageCan Microwave SinkBasin'),
  'Fork': ('c', 'table Drawer SinkBasin'),
  'Glassbottle': ('', 'table bureau Cabinet Fridge Microwave Shelf SinkBasin'),
  'HandTowel': (
    '',
    'table bath Cabinet Cart Drawer GarbageCan HandTowelHolder Shelf Toilet',
  ),
  'Kettle': ('c', 'table Cabinet Shelf SinkBasin StoveBurner'),
  'KeyChain': ('', 'table seat bureau Drawer Safe Shelf'),
  'Knife': ('c', 'table Drawer SinkBasin'),
  'Ladle': ('c', 'table Cabinet Drawer SinkBasin'),
  'Laptop': ('', 'table seat bureau Bed'),
  'Lettuce': ('cks', 'table Fridge GarbageCan SinkBasin'),
  'Mug': (
    'chkr',
    'table bureau Cabinet Cart CoffeeMachine Fridge Microwave Shelf SinkBasin',
  ),
  'Newspaper': (
    '',
    'table seat bureau Bed Cabinet Drawer GarbageCan Shelf Toilet',
  ),
  'Pan': ('ckr', 'table Cabinet Fridge SinkBasin StoveBurner'),
  'PaperTowel': ('', 'table Cart GarbageCan Shelf Toilet'),
  'Pen': ('', 'table bureau Drawer GarbageCan Shelf'),
  'Pencil': ('', 'table bureau Drawer GarbageCan Shelf'),
  'PepperShaker': ('', 'table Cabinet Drawer Shelf'),
  'Pillow': ('', 'seat Bed'),
  'Plate': ('chkr', 'table bureau Cabinet Fridge Microwave Shelf SinkBasin'),
  'Plunger': ('', 'Cabinet Cart'),
  'Pot': ('ckr', 'table Cabinet Fridge Shelf SinkBasin StoveBurner'),
  'Potato': ('chks', 'table Fridge GarbageCan Microwave SinkBasin'),
  'RemoteControl': ('', 'table seat bureau Drawer Shelf'),
  'SaltShaker': ('', 'table Cabinet Drawer Shelf'),
  'SoapBar': (
    'c',
    'table BathtubBasin Cabinet Cart Drawer GarbageCan Shelf SinkBasin Toilet',
  ),
  'SoapBottle': ('', 'table Cabinet Cart Desk Drawer GarbageCan Shelf Toilet'),
  'Spatula': ('c', 'table Drawer SinkBasin'),
  'Spoon': ('c', 'table Drawer SinkBasin'),
  'SprayBottle': (
    '',
    'table bureau Cabinet Cart Drawer GarbageCan Shelf Toilet',
  ),
  'Statue': ('', 'table bureau Cart Safe Shelf'),
  'TennisRacket': ('', 'table bureau Bed'),
  'TissueBox': (
    '',
    'table bureau Cabinet Cart Drawer GarbageCan Shelf TVStand Toilet',
  ),
  'ToiletPaper': (
    '',
    'table bureau Cabinet Cart Drawer GarbageCan Shelf Toilet '
    'ToiletPaperHanger',
  ),
  'ToiletPaperRoll': (
    '',
    'table bureau Cabinet Cart Drawer GarbageCan Shelf Toilet '
    'ToiletPaperHanger',
  ),
  'Tomato': ('chks', 'table Fridge GarbageCan Microwave SinkBasin'),
  'Towel': ('', 'TowelHolder'),
  'Vase': ('', 'table bureau Cabinet Cart Safe Shelf'),
  'Watch': ('', 'table bureau Drawer Safe Shelf'),
  'WateringCan': ('', 'table bureau Cabinet Drawer Shelf'),
  'WineBottle': ('k', 'table bureau Cabinet Fridge GarbageCan Shelf'),
}

# Room -> receptacle types with "count*weight,...". A weight is the number of
# rooms, of 30, that have this count (`2*11`: 11 of 30 rooms have 2); the
# remaining rooms have none. The numbers were counted in ALFRED's floor plans.
# The plans do not list CoffeeMachine, StoveBurner, Toaster, GarbageCan,
# LaundryHamper and, in bathrooms, SinkBasin, Toilet and the holders; their
# numbers are estimates.
_RECEPTACLES = {
  'kitchen': (
    'Cabinet=2*1,3*1,4*3,5*1,6*2,8*3,9*4,10*1,11*1,13*4,15*2,17*1,18*1,'
    '20*2,21*2,28*1 '
    'CoffeeMachine=1*30 CounterTop=1*6,2*11,3*10,4*3 '
    'DiningTable=1*12,2*3,3*1 '
    'Drawer=1*3,2*1,3*6,4*3,5*3,6*2,7*1,8*2,9*1,11*1,12*1,27*1 Fridge=1*30 '
    'GarbageCan=1*30 Microwave=1*30 Safe=1*1 Shelf=2*1,3*4 SideTable=1*3 '
    'SinkBasin=1*30 StoveBurner=4*27,2*2,6*1 Toaster=1*30'
  ),
  'living': (
    'ArmChair=1*18,2*8,3*1 Cabinet=4*2,8*1 CoffeeTable=1*19,2*6 Desk=1*1 '
    'DiningTable=1*11,2*3 Drawer=1*6,2*1,3*1,4*5,5*1,6*3,7*3,8*1,12*1,19*1 '
    'Dresser=1*9,2*1 GarbageCan=1*30 Ottoman=1*3 Safe=1*2 '
    'Shelf=1*2,3*1,4*2,6*1,8*3,12*1,13*1,14*1 SideTable=1*11,2*7,3*5,5*1 '
    'Sofa=1*24,2*6 TVStand=1*10,2*2'
  ),
  'bedroom': (
    'ArmChair=1*4,2*1,3*1 Bed=1*26,2*4 Cabinet=1*1,2*1,4*3 CoffeeTable=1*1 '
    'CounterTop=1*1 Desk=1*16,2*3 DiningTable=1*5 '
    'Drawer=1*1,2*8,3*5,4*1,5*2,6*1,7*2,10*3,11*2,13*1,14*2 '
    'Dresser=1*13,2*2 GarbageCan=1*30 LaundryHamper=1*8 Safe=1*4 '
    'Shelf=1*5,2*4,3*2,4*1,5*2,6*1,8*2,10*1,14*1 SideTable=1*14,2*5'
  ),
  'bathroom': (
    'BathtubBasin=1*20 Cabinet=2*1,3*2,4*9,5*2,9*1 Cart=1*2 '
    'CounterTop=1*22,2*3 Drawer=1*1,2*1,4*3,6*2,7*2,8*2 Dresser=1*2 '
    'GarbageCan=1*30 HandTowelHolder=1*16,2*14 Shelf=1*1,2*2,3*1,4*1 '
    'SideTable=1*2 SinkBasin=1*16,2*14 Toilet=1*30 ToiletPaperHanger=1*30 '
    'TowelHolder=1*30'
  ),
}

# Room -> object types with the number of rooms, of 30, that contain one.
_OBJECT_ROOMS = {
  'kitchen': (
    'Apple=30 Book=2 Bowl=30 Bread=30 ButterKnife=29 CellPhone=4 '
    'CreditCard=3 Cup=30 DishSponge=30 Egg=30 Fork=30 Glassbottle=7 '
    'Kettle=15 Knife=30 Ladle=10 Lettuce=30 Mug=30 Pan=30 Pen=2 Pencil=2 '
    'PepperShaker=30 Plate=30 Pot=30 Potato=30 SaltShaker=30 SoapBottle=30 '
    'Spatula=30 Spoon=30 SprayBottle=2 Statue=4 Tomato=30 Vase=4 '
    'WineBottle=10'
  ),
  'living': (
    'Book=7 Bowl=4 Box=30 Candle=3 CellPhone=7 CreditCard=30 DeskLamp=7 '
    'KeyChain=30 Laptop=30 Newspaper=18 Pen=5 Pencil=4 Pillow=30 Plate=10 '
    'RemoteControl=30 Statue=29 TissueBox=9 Vase=18 Watch=16 WateringCan=13'
  ),
  'bedroom': (
    'AlarmClock=30 BaseballBat=13 BasketBall=11 Book=30 Bowl=13 Box=12 '
    'CD=30 CellPhone=30 Cloth=5 CreditCard=30 DeskLamp=20 KeyChain=30 '
    'Laptop=30 Mug=16 Pen=30 Pencil=30 Pillow=30 RemoteControl=3 Statue=4 '
    'TennisRacket=10 TissueBox=4 Vase=3 Watch=2'
  ),
  'bathroom': (
    'Candle=30 Cloth=30 DishSponge=6 HandTowel=30 Plunger=30 SoapBar=30 '
    'SoapBottle=30 SprayBottle=30 TissueBox=9 ToiletPaper=30 Towel=30'
  ),
}

# (Task type, room) -> how often a goal names each object type, and each
# receptacle type.
_GOALS = {
  ('look_at_obj_in_light', 'bedroom'): (
    (
      'CD=12 CellPhone=9 CreditCard=5 KeyChain=4 Laptop=17 Mug=4 Pen=18 '
      'Pencil=23 Pillow=39 Statue=6 TissueBox=6 Vase=2 Watch=3'
    ),
    'DeskLamp=148',
  ),
  ('look_at_obj_in_light', 'living'): (
    (
      'Laptop=3 Newspaper=15 Pillow=8 Plate=3 Statue=5 TissueBox=4 Vase=2 '
      'Watch=3'
    ),
    'DeskLamp=43',
  ),
  ('pick_and_place_simple', 'bathroom'): (
    (
      'Candle=45 Cloth=25 DishSponge=7 HandTowel=51 SoapBar=7 SoapBottle=52 '
      'SprayBottle=50 TissueBox=7 ToiletPaper=57'
    ),
    (
      'BathtubBasin=19 Cabinet=19 Cart=13 CounterTop=26 Drawer=16 Dresser=2 '
      'GarbageCan=48 Shelf=2 SideTable=9 SinkBasin=13 Toilet=92 '
      'ToiletPaperHanger=42'
    ),
  ),
  ('pick_and_place_simple', 'bedroom'): (
    (
      'CellPhone=51 CreditCard=14 KeyChain=26 Laptop=6 Mug=3 Pen=20 '
      'Pencil=24 Pillow=2 RemoteControl=3 Statue=3 TissueBox=3 Watch=2'
    ),
    (
      'ArmChair=12 Bed=13 Desk=36 DiningTable=7 Drawer=8 Dresser=22 '
      'GarbageCan=2 Safe=9 Shelf=24 SideTable=24'
    ),
  ),
  ('pick_and_place_simple', 'kitchen'): (
    (
      'Cup=2 DishSponge=3 Egg=4 Fork=2 Glassbottle=10 Kettle=9 Knife=6 '
      'Ladle=3 Lettuce=2 Pan=8 PepperShaker=12 Pot=3 Potato=3 SaltShaker=3 '
      'SoapBottle=1 Spoon=6 Tomato=8 WineBottle=5'
    ),
    (
      'Cabinet=8 CounterTop=9 DiningTable=12 Drawer=7 Fridge=5 GarbageCan=1 '
      'Microwave=12 Shelf=8 SideTable=3 SinkBasin=22 StoveBurner=3'
    ),
  ),
  ('pick_and_place_simple', 'living'): (
    (
      'CreditCard=21 KeyChain=26 Laptop=17 Newspaper=17 Pillow=15 Plate=3 '
      'RemoteControl=31 Statue=19 TissueBox=6 Vase=10 Watch=15'
    ),
    (
      'ArmChair=44 CoffeeTable=41 Drawer=5 Dresser=9 GarbageCan=3 '
      'Ottoman=20 Safe=3 Shelf=3 SideTable=13 Sofa=39'
    ),
  ),
  ('pick_clean_then_place_in_recep', 'bathroom'): (
    'Cloth=6 DishSponge=32 SoapBar=119',
    (
      'BathtubBasin=40 Cabinet=19 Cart=9 CounterTop=22 Drawer=15 '
      'GarbageCan=20 Shelf=6 Toilet=26'
    ),
  ),
  ('pick_clean_then_place_in_recep', 'kitchen'): (
    (
      'Cup=20 DishSponge=5 Egg=23 Fork=23 Kettle=47 Knife=33 Ladle=38 '
      'Lettuce=31 Mug=32 Pan=28 Plate=22 Pot=16 Potato=25 Spatula=29 '
      'Spoon=26 Tomato=26'
    ),
    (
      'Cabinet=35 CoffeeMachine=32 CounterTop=60 DiningTable=78 Drawer=47 '
      'Fridge=27 GarbageCan=12 Microwave=35 Shelf=26 SideTable=35 '
      'StoveBurner=37'
    ),
  ),
  ('pick_cool_then_place_in_recep', 'kitchen'): (
    (
      'Cup=35 Egg=33 Lettuce=65 Mug=79 Pan=52 Plate=34 Pot=60 Potato=51 '
      'Tomato=39 WineBottle=18'
    ),
    (
      'Cabinet=40 CoffeeMachine=49 CounterTop=58 DiningTable=62 '
      'GarbageCan=36 Microwave=69 Shelf=34 SideTable=10 SinkBasin=69 '
      'StoveBurner=39'
    ),
  ),
  ('pick_heat_then_place_in_recep', 'kitchen'): (
    'Egg=78 Mug=105 Plate=44 Potato=78 Tomato=62',
    (
      'Cabinet=37 CoffeeMachine=55 CounterTop=34 DiningTable=33 Fridge=73 '
      'GarbageCan=45 Shelf=15 SideTable=34 SinkBasin=41'
    ),
  ),
  ('pick_two_obj_and_place', 'bathroom'): (
    (
      'Cloth=26 DishSponge=19 HandTowel=37 SoapBar=51 SoapBottle=53 '
      'SprayBottle=58 TissueBox=8 ToiletPaper=59'
    ),
    (
      'BathtubBasin=39 Cabinet=33 Cart=18 CounterTop=31 Drawer=36 Dresser=3 '
      'GarbageCan=41 Shelf=13 SideTable=9 SinkBasin=17 Toilet=71'
    ),
  ),
  ('pick_two_obj_and_place', 'bedroom'): (
    (
      'CellPhone=42 CreditCard=14 KeyChain=10 Laptop=8 Mug=5 Pen=20 '
      'Pencil=25 Pillow=2 TissueBox=6 Vase=1 Watch=5'
    ),
    (
      'ArmChair=5 Bed=19 Cabinet=2 Desk=28 DiningTable=8 Drawer=16 '
      'Dresser=13 GarbageCan=3 Safe=4 Shelf=16 SideTable=24'
    ),
  ),
  ('pick_two_obj_and_place', 'kitchen'): (
    (
      'Cup=9 Egg=5 Fork=6 Glassbottle=8 Kettle=6 Knife=2 Ladle=4 Lettuce=17 '
      'Pan=1 PepperShaker=23 Pot=3 Potato=9 SaltShaker=25 Spatula=8 Spoon=9 '
      'Tomato=3 WineBottle=6'
    ),
    (
      'Cabinet=22 CounterTop=9 DiningTable=11 Drawer=30 Fridge=17 '
      'GarbageCan=2 Microwave=14 Shelf=13 SideTable=8 SinkBasin=18'
    ),
  ),
  ('pick_two_obj_and_place', 'living'): (
    (
      'CellPhone=10 CreditCard=32 KeyChain=27 Laptop=3 Newspaper=38 '
      'Pencil=3 Pillow=5 Plate=5 RemoteControl=52 Statue=10 TissueBox=12 '
      'Vase=13 Watch=8 WateringCan=3'
    ),
    (
      'ArmChair=70 CoffeeTable=49 Desk=2 DiningTable=7 Drawer=7 Dresser=7 '
      'GarbageCan=6 Ottoman=16 Safe=3 Shelf=5 SideTable=6 Sofa=43'
    ),
  ),
}

# Task type -> number of games in the full training set.
TASK_WEIGHTS = {
  'pick_and_place_simple': 790,
  'look_at_obj_in_light': 308,
  'pick_clean_then_place_in_recep': 650,
  'pick_heat_then_place_in_recep': 459,
  'pick_cool_then_place_in_recep': 533,
  'pick_two_obj_and_place': 813,
}
TOOLS = {
  'pick_clean_then_place_in_recep': 'SinkBasin',
  'pick_heat_then_place_in_recep': 'Microwave',
  'pick_cool_then_place_in_recep': 'Fridge',
}
TEMPLATES = {
  'pick_and_place_simple': ('put a {} in {}.', 'put some {} on {}.'),
  'look_at_obj_in_light': (
    'look at {} under the {}.',
    'examine the {} with the {}.',
  ),
  'pick_clean_then_place_in_recep': (
    'put a clean {} in {}.',
    'clean some {} and put it in {}.',
  ),
  'pick_heat_then_place_in_recep': (
    'put a hot {} in {}.',
    'heat some {} and put it in {}.',
  ),
  'pick_cool_then_place_in_recep': (
    'put a cool {} in {}.',
    'cool some {} and put it in {}.',
  ),
  'pick_two_obj_and_place': (
    'put two {} in {}.',
    'find two {} and put them in {}.',
  ),
}
OPENABLE = frozenset(('Fridge', 'Cabinet', 'Microwave', 'Drawer', 'Safe'))

# Receptacle type -> relative number of objects in it; 1 if not listed. These
# are estimates.
CAPACITIES = {
  'CounterTop': 6.0,
  'DiningTable': 6.0,
  'Desk': 5.0,
  'Dresser': 4.0,
  'CoffeeTable': 4.0,
  'SideTable': 3.0,
  'Bed': 3.0,
  'Fridge': 2.5,
  'SinkBasin': 2.0,
  'Sofa': 2.0,
  'Cabinet': 0.6,
  'Drawer': 0.6,
}
LAMP_PLACES = frozenset(
  ('Desk', 'Dresser', 'SideTable', 'DiningTable', 'CoffeeTable', 'Shelf')
)


def _weights(text: str) -> dict[str, int]:
  return {
    name: int(weight)
    for name, _, weight in (word.partition('=') for word in text.split())
  }


def _count_weights(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
  pairs = [pair.split('*') for pair in text.split(',')]
  counts = tuple(int(count) for count, _ in pairs)
  weights = tuple(int(weight) for _, weight in pairs)
  return (0, *counts), (30 - sum(weights), *weights)


def _expand_groups(text: str) -> frozenset[str]:
  return frozenset(' '.join(_GROUPS.get(w, w) for w in text.split()).split())


# Object type -> receptacle types that can contain it.
PLACES = {name: _expand_groups(types) for name, (_, types) in _OBJECTS.items()}

# Object type -> its flags (unary facts).
FLAGS = {
  name: frozenset(('pickupable', *(_FLAGS[letter] for letter in letters)))
  for name, (letters, _) in _OBJECTS.items()
} | {'DeskLamp': frozenset(('toggleable',))}

# Room -> receptacle type -> (counts, weights).
RECEPTACLES = {
  room: {
    name: _count_weights(counts)
    for name, _, counts in (word.partition('=') for word in text.split())
  }
  for room, text in _RECEPTACLES.items()
}

# Room -> object type -> number of rooms, of 30, that contain one.
OBJECTS = {room: _weights(text) for room, text in _OBJECT_ROOMS.items()}

# (Task type, room) -> (weights of object types, weights of receptacle types).
GOALS = {
  key: (_weights(objects), _weights(receptacles))
  for key, (objects, receptacles) in _GOALS.items()
}
