"""Word lists for generated shops: departments, attributes, colours, sizes.

`catalogue.py` draws from them. Every list starts with its most common entries,
because a smaller vocabulary uses only the beginning of each list.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Department:
  """One category of a shop.

  Attributes:
    path: first level of the product category.
    aisles: aisle -> shelves; a shelf is (search phrase, noun of a title).
    qualities: attributes that precede the noun ('oil free').
    parts: attributes that follow 'with' ('green tea').
    uses: attributes that follow 'for' ('dry skin').
    options: option name -> usual values.
    option_counts: weights of products with 0, 1, 2, 3 options.
    price: median price in dollars.
  """

  path: str
  aisles: dict[str, tuple[tuple[str, str], ...]]
  qualities: tuple[str, ...]
  parts: tuple[str, ...]
  uses: tuple[str, ...]
  options: dict[str, tuple[str, ...]]
  option_counts: tuple[int, ...]
  price: float


def _list(text: str) -> tuple[str, ...]:
  return tuple(item.strip() for item in text.split(',') if item.strip())


COLORS = _list("""
  Black, White, Red, Blue, Green, Grey, Pink, Brown, Purple, Yellow, Orange,
  Beige, Gold, Silver, Navy Blue, Dark Green, Light Pink, Rose Gold, Wine Red,
  Sky Blue, Army Green, Coffee, Khaki, Ivory, Turquoise, Charcoal, Burgundy,
  Dark Grey, Light Blue, Mint Green, Hot Pink, Royal Blue, Camel, Champagne,
  A-black, A-white, B-blue, B-red, Black & White, Red & Black, Multicolor 1,
  Multicolor 2, Leopard Print, Grey Stripe, Blue Floral""")

_CLOTHING_SIZES = _list("""
  Small, Medium, Large, X-Large, XX-Large, X-Small, 3X-Large, 4X-Large,
  5X-Large""")

BRANDS = _list("""
  Alder, Brisk, Corva, Delmo, Elgin, Fenwick, Garnet, Harlo, Ivyton, Junova,
  Kestrel, Lumora, Mavido, Norrel, Ostara, Pellan, Quillon, Rovanna, Sundell,
  Tarnby, Umbrio, Velmar, Wexley, Xandor, Yarrow, Zephira, Arvino, Bellwick,
  Cendra, Dovemill, Elmhurst, Farlane, Gildon, Hexmoor, Inverly, Jorvik,
  Kalmar, Lintel, Morwen, Nettle Hill, Oakrun, Pineway, Quarry Lane, Redfern,
  Saltmarsh, Thornby, Upland, Vantell, Willowick, Yewdale""")

# Title phrases without content; none is an attribute, an option or a noun.
FILLERS = _list("""
  Great Gift Idea, 2 Pack, New Design, Upgraded Version, Set of 3, Gift Box,
  Best Choice, for Men and Women, Ideal Present, Everyday Essential, Big Value,
  Original Edition, Updated Model, 4 Pieces, Family Favorite, Top Choice,
  with Free Storage Pouch, Popular Pick, Holiday Special, 1 Count""")

DEPARTMENTS = {
  'beauty': Department(
    path='Beauty & Personal Care',
    aisles={
      'Hair Care': (
        ('shampoo', 'Shampoo'),
        ('hair masks', 'Hair Mask'),
        ('hair brushes', 'Hair Brush'),
        ('hair treatment oils', 'Hair Oil'),
      ),
      'Skin Care': (
        ('face creams', 'Face Cream'),
        ('body lotions', 'Body Lotion'),
        ('lip balms', 'Lip Balm'),
        ('sunscreens', 'Sunscreen'),
      ),
      'Oral Care': (
        ('toothbrushes', 'Toothbrush'),
        ('tongue cleaners', 'Tongue Cleaner'),
      ),
      'Makeup': (
        ('lipsticks', 'Lipstick'),
        ('makeup palettes', 'Makeup Palette'),
        ('makeup brushes', 'Makeup Brush'),
        ('false eyelashes', 'Eyelashes'),
      ),
      'Tools & Accessories': (
        ('refillable containers', 'Travel Bottle'),
        ('toiletry bags', 'Toiletry Bag'),
      ),
    },
    qualities=_list("""
      cruelty free, long lasting, paraben free, easy apply, fragrance free,
      travel size, oil free, leak proof, sulfate free, bpa free, alcohol free,
      easy carry, dermatologist tested, non toxic, highly pigmented,
      certified organic"""),
    parts=_list("""
      coconut oil, tea tree, hyaluronic acid, green tea, vitamin c,
      natural ingredients, argan oil, aloe vera, shea butter, soft bristles,
      storage case, essential oils"""),
    uses=_list("""
      dry skin, sensitive skin, damaged hair, bad breath, hair growth,
      dead skin, dry hair, fine lines, natural hair, dark circles,
      sensitive teeth, acne prone skin"""),
    options={
      'Color': COLORS,
      'Size': _list("""
        1 Ounce, 2 Ounce, 4 Ounce, 8 Ounce, 1.7 Fl Oz, 3.4 Fl Oz,
        16 Ounce (Pack of 2), 10 Inch, 12 Inch, 14 Inch"""),
      'Scent': _list("""
        Rose, Lavender, Vanilla, Lemon, Unscented, Coconut, Peppermint, Jasmine,
        Sandalwood, Grapefruit"""),
    },
    option_counts=(66, 29, 5),
    price=16.0,
  ),
  'electronics': Department(
    path='Electronics',
    aisles={
      'Audio': (
        ('headphones', 'Headphones'),
        ('bluetooth speakers', 'Speaker'),
        ('soundbars', 'Soundbar'),
        ('microphones', 'Microphone'),
      ),
      'Cables': (
        ('hdmi cables', 'HDMI Cable'),
        ('usb cables', 'USB Cable'),
        ('power adapters', 'Power Adapter'),
      ),
      'Computers & Tablets': (
        ('laptops', 'Laptop'),
        ('tablets', 'Tablet'),
        ('keyboards', 'Keyboard'),
        ('laptop sleeves', 'Laptop Sleeve'),
      ),
      'Camera & Photo': (
        ('digital cameras', 'Camera'),
        ('tripods', 'Tripod'),
        ('camera bags', 'Camera Bag'),
      ),
      'Phone Accessories': (
        ('phone cases', 'Phone Case'),
        ('screen protectors', 'Screen Protector'),
      ),
    },
    qualities=_list("""
      high speed, fast charging, hands free, water resistant, easy install,
      high definition, gold plated, noise cancelling, heavy duty, plug play,
      dual band, ultra hd, scratch resistant, high resolution, non slip,
      high performance"""),
    parts=_list("""
      tempered glass, usb port, quad core, carrying case, aluminum alloy,
      stereo sound, optical zoom, volume control, remote control, hard drive,
      batteries included, lcd display"""),
    uses=_list("""
      wireless charging, home theater, digital photography, video recording,
      motion detection, bird watching, music streaming, video gaming,
      office work, car navigation, outdoor travel, live broadcast"""),
    options={
      'Color': COLORS,
      'Size': _list("""
        3 Feet, 6 Feet, 10 Feet, 15 Feet, 25 Feet, 13 Inch, 14 Inch, 15.6 Inch,
        38mm, 40mm, 42mm, 44mm"""),
      'Style': _list("""
        Basic, Pro, Wired, Wireless, With Case, Without Case, 64GB, 128GB,
        256GB"""),
    },
    option_counts=(78, 18, 4),
    price=26.0,
  ),
  'fashion': Department(
    path='Clothing, Shoes & Jewelry',
    aisles={
      'Women': (
        ("women's dresses", "Women's Dress"),
        ("women's sweaters", "Women's Sweater"),
        ("women's pants", "Women's Pants"),
        ("women's sandals", "Women's Sandals"),
        ("women's socks & hosiery", "Women's Socks"),
        ("women's coats & jackets", "Women's Jacket"),
        ("women's shorts", "Women's Shorts"),
        ("women's boots", "Women's Boots"),
      ),
      'Men': (
        ("men's shirts", "Men's Shirt"),
        ("men's shorts", "Men's Shorts"),
        ("men's jeans", "Men's Jeans"),
        ("men's hoodies", "Men's Hoodie"),
        ("men's sneakers", "Men's Sneakers"),
        ("men's pajamas", "Men's Pajamas"),
        ("men's t-shirts & tanks", "Men's T-Shirt"),
        ("men's jackets", "Men's Jacket"),
      ),
    },
    qualities=_list("""
      machine wash, slim fit, hand wash, loose fit, light weight, wash cold,
      moisture wicking, water proof, quick drying, non slip, fleece lined,
      straight leg, officially licensed, butt lifting, wide leg,
      wrinkle free"""),
    parts=_list("""
      long sleeve, short sleeve, rubber sole, high waist, elastic waist,
      drawstring closure, arch support, memory foam, button closure,
      polyester spandex, faux fur, tummy control"""),
    uses=_list("""
      daily wear, gym workout, teen girls, winter sports, office parties,
      beach holidays, cold weather, everyday running, hiking trips,
      valentine day, night out, summer evenings"""),
    options={
      'Size': _CLOTHING_SIZES,
      'Color': COLORS,
      'Fit Type': ('Men', 'Women', 'Youth'),
    },
    option_counts=(21, 18, 56, 5),
    price=20.0,
  ),
  'garden': Department(
    path='Home & Kitchen',
    aisles={
      'Furniture': (
        ('console tables', 'Console Table'),
        ('book cases', 'Bookcase'),
        ('bar stools', 'Bar Stool'),
        ('mattresses', 'Mattress'),
        ('vanities', 'Vanity'),
        ('ottomans', 'Ottoman'),
      ),
      'Lighting': (
        ('chandeliers', 'Chandelier'),
        ('table lamps', 'Table Lamp'),
        ('wall sconces', 'Wall Sconce'),
      ),
      'Home Décor': (
        ('wall art', 'Wall Art'),
        ('decorative pillows', 'Throw Pillow'),
        ('area rugs', 'Area Rug'),
        ('window coverings', 'Curtains'),
      ),
      'Kitchen & Dining': (
        ('storage baskets', 'Storage Basket'),
        ('baking cups', 'Baking Cups'),
        ('tablecloths', 'Tablecloth'),
      ),
    },
    qualities=_list("""
      easy clean, easy assemble, space saving, machine washable, heavy duty,
      eco friendly, wall mounted, mid century, height adjustable, high density,
      double sided, ready hang, fully assembled, hand painted, queen size,
      spot clean"""),
    parts=_list("""
      solid wood, storage space, steel frame, tempered glass, memory foam,
      wood finish, clear glass, metal legs, faux leather, glass shade,
      box spring, contemporary design"""),
    uses=_list("""
      living room, dining room, small spaces, guest bedroom, home office,
      baby shower, outdoor patio, kitchen counter, entry hall, laundry corner,
      garden parties, studio flats"""),
    options={
      'Color': COLORS,
      'Size': _list("""
        Small, Medium, Large, Twin, Full, Queen, King, 16" x 16", 18" x 18",
        20" x 20", 2 x 3 Feet, 5 x 7 Feet"""),
      'Style': _list("""
        Classic, Modern, Country, Set of 2, Set of 4, With Drawer,
        Without Drawer"""),
    },
    option_counts=(51, 35, 12, 2),
    price=95.0,
  ),
  'grocery': Department(
    path='Grocery & Gourmet Food',
    aisles={
      'Snack Foods': (
        ('chips & crisps', 'Chips'),
        ('cookies', 'Cookies'),
        ('granola bars', 'Granola Bars'),
        ('popcorn', 'Popcorn'),
        ('dried fruits', 'Dried Fruit'),
      ),
      'Beverages': (
        ('teas', 'Tea'),
        ('coffees', 'Coffee'),
        ('drink mixes', 'Drink Mix'),
        ('fruit juices', 'Juice'),
      ),
      'Pantry Staples': (
        ('pastas', 'Pasta'),
        ('sauces', 'Sauce'),
        ('breads & bakery', 'Bread'),
        ('nut butters', 'Nut Butter'),
        ('seasonings', 'Seasoning'),
      ),
      'Candy & Chocolate': (
        ('chocolates', 'Chocolate'),
        ('gummies', 'Gummies'),
      ),
    },
    qualities=_list("""
      gluten free, non gmo, low sugar, dairy free, plant based, keto friendly,
      fat free, usda organic, nut free, freeze dried, low carb, ready eat,
      caffeine free, individually wrapped, low sodium, soy free"""),
    parts=_list("""
      natural flavors, whole grain, sea salt, cocoa butter, dietary fiber,
      quality ingredients, pea protein, real fruit, cane sugar, olive oil,
      artificial flavors, simple ingredients"""),
    uses=_list("""
      school lunch, gift giving, birthday party, after dinner, quick breakfast,
      road trips, game night, afternoon breaks, weight control, picnics outside,
      movie night, camping meals"""),
    options={
      'Flavor Name': _list("""
        Chocolate, Vanilla, Strawberry, Original, Honey, Lemon, Cinnamon,
        Salted Caramel, Barbecue, Peanut, Mixed Berry, Spicy Mango"""),
      'Size': _list("""
        8 Ounce, 12 Ounce, 16 Ounce, 1 Pound, 2 Pound, 8 Ounce (Pack of 6),
        12 Ounce (Pack of 12), 24 Count"""),
      'Style': _list('Bag, Box, Jar, Variety Pack'),
    },
    option_counts=(74, 20, 6),
    price=24.0,
  ),
}
