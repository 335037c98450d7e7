"""Tests of the help desk: tools, policy, user, checker, expert, anchors."""

import dataclasses
import itertools
import json

import pytest

import envs
from envs import base, narrator, tool_calls
from envs.helpdesk import cases, database, expert, tools
from envs.helpdesk import env as helpdesk

TASK = base.Task('train', 0)
TABLES = {
  'users': [('U1', 'Ann Bell', '111', 5), ('U2', 'Ann Bell', '222', 0)],
  'products': [
    ('P1', 'lamp', 'red', 30, 3),
    ('P2', 'lamp', 'blue', 40, 3),
    ('P3', 'chair', 'red', 90, 3),
  ],
  'orders': [
    ('W1', 'U1', 'P1', 'pending', 0, '1 Oak Street', ''),
    ('W2', 'U1', 'P3', 'delivered', 31, '1 Oak Street', ''),
    ('W3', 'U2', 'P2', 'shipped', 0, '2 Hill Road', ''),
  ],
}
EXCHANGE = cases.Case(
  kind='exchange',
  allowed=True,
  tables=TABLES,
  request='I want my lamp in another option.',
  facts={'identity': 'I am Ann Bell, zip code 111.', 'option': 'blue'},
  user_id='U1',
  name='Ann Bell',
  zip_code='111',
  product='lamp',
  call=tool_calls.Call(
    'exchange_order', {'order_id': 'W1', 'product_id': 'P2'}
  ),
)
LATE = cases.Case(
  kind='return',
  allowed=False,
  tables=TABLES,
  request='I want to return my chair.',
  facts={'identity': 'I am Ann Bell, zip code 111.'},
  user_id='U1',
  name='Ann Bell',
  zip_code='111',
  product='chair',
  call=tool_calls.Call('return_order', {'order_id': 'W2'}),
)


def _call(tool: str, /, **arguments) -> str:
  return expert.respond(tool_calls.Call(tool, arguments))


DONE, REFUSED = (_call('close_case', outcome=o) for o in tools.OUTCOMES)
FIND = _call('find_user', name='Ann Bell', zip_code='111')
ORDER = _call('find_order', user_id='U1', product='lamp')


@pytest.fixture(name='start')
def fixture_start(monkeypatch):
  def start(case: cases.Case, **options):
    monkeypatch.setattr(helpdesk, '_case', lambda *_: case)
    env = helpdesk.Env(**options)
    return env, env.reset(TASK)

  return start


def test_a_case_worked_out_by_hand(start):
  env, first = start(EXCHANGE)
  assert [m.role for m in first.messages] == ['system', 'user']
  assert '30 days' in first.messages[0].text
  assert [json.loads(tool)['name'] for tool in first.tools] == [*tools.TOOLS]
  responses = [
    'Who are you?',
    FIND,
    ORDER,
    'Which option do you want?',
    _call('find_product', product='lamp', option='blue'),
    _call('exchange_order', order_id='W1', product_id='P2'),
  ]
  results = [env.step(response) for response in responses]
  assert [r.observation.messages[0].text for r in results] == [
    'I am Ann Bell, zip code 111.',
    '{"user_id": "U1"}',
    '{"order_id": "W1", "status": "pending"}',
    'blue',
    '{"product_id": "P2", "stock": 3}',
    'exchanged',
  ]
  roles = [r.observation.messages[0].role for r in results]
  assert roles == ['user', 'tool', 'tool', 'user', 'tool', 'tool']
  last = env.step(DONE)
  assert last.success and last.done and last.reward == 10
  assert [r.reward for r in results] == [0] * 6 and last.observation is None
  # Credit 5 + 30 - 40; the red lamp is back, a blue one is gone.
  changes = env._db.rows() - env._start
  assert changes == {
    ('users', ('U1', 'Ann Bell', '111', -5)),
    ('products', ('P1', 'lamp', 'red', 30, 4)),
    ('products', ('P2', 'lamp', 'blue', 40, 2)),
    ('orders', ('W1', 'U1', 'P2', 'pending', 0, '1 Oak Street', '')),
    ('outcomes', ('done',)),
  }


@pytest.mark.parametrize(
  ('case', 'responses', 'success'),
  [
    (LATE, [REFUSED], True),
    # The tool accepts a late return, the policy does not.
    (LATE, [_call('return_order', order_id='W2'), DONE], False),
    (LATE, [DONE], False),
    (EXCHANGE, [DONE], False),
    (EXCHANGE, [REFUSED], False),
    (EXCHANGE, [expert.respond(EXCHANGE.call), REFUSED], False),
    (EXCHANGE, [expert.respond(EXCHANGE.call), DONE], True),
    (EXCHANGE, [expert.respond(EXCHANGE.call) + DONE], True),
    # After the case is closed, nothing changes.
    (EXCHANGE, [DONE + expert.respond(EXCHANGE.call)], False),
    # An exchange there and back leaves the database unchanged.
    (
      EXCHANGE,
      [
        _call('exchange_order', order_id='W1', product_id=product)
        for product in ('P2', 'P1', 'P2')
      ]
      + [DONE],
      True,
    ),
  ],
)
def test_only_the_exact_database_succeeds(start, case, responses, success):
  env, _ = start(case)
  *_, last = map(env.step, responses)
  assert (last.success, last.reward) == (success, 10.0 * success)
  assert last.done and last.valid


@pytest.mark.parametrize(
  ('call', 'text'),
  [
    (('find_user', 'Ann Bell', '333'), 'Error: no such row in users: Ann'),
    (('find_order', 'U9', 'lamp'), 'Error: no such row in users: U9'),
    (('find_order', 'U2', 'chair'), 'Error: no such row in orders: U2, chair'),
    (('get_order', "W1' OR '1"), "Error: no such row in orders: W1' OR '1"),
    (('get_order', 'W' * 999), 'Error: no such row in orders: WWW'),
    (('cancel_order', 'W3', 'late'), 'Error: the order is shipped, not pend'),
    (('return_order', 'W1'), 'Error: the order is pending, not delivered'),
    (('change_address', 'W2', 'x'), 'Error: the order is delivered, not pen'),
    (('exchange_order', 'W1', 'P3'), 'Error: chair is not an option of lamp'),
    (('exchange_order', 'W1', 'P9'), 'Error: no such row in products: P9'),
    (('exchange_order', 'W3', 'P1'), 'Error: the order is shipped, not pend'),
    (('close_case', 'maybe'), 'Error: outcome must be done or refused'),
    (('get_order', 'W3'), '{"product": "lamp", "option": "blue", "status": "s'),
  ],
)
def test_calls_that_change_nothing(call, text):
  db = database.Database(TABLES)
  before = db.rows()
  name, *values = call
  arguments = dict(zip(tools.TOOLS[name].parameters, values, strict=True))
  result = tools.run(db, tool_calls.Call(name, arguments))
  assert result.startswith(text) and len(result) <= len('Error: ') + 200
  assert db.rows() == before


def test_writes_by_hand():
  db = database.Database(TABLES)
  run = [
    ('cancel_order', {'order_id': 'W1', 'reason': 'late'}, 'cancelled'),
    ('return_order', {'order_id': 'W2'}, 'returned'),
  ]
  for name, arguments, text in run:
    assert tools.run(db, tool_calls.Call(name, arguments)) == text
  assert db.find('users', user_id='U1')[0]['credit'] == 5 + 30 + 90
  rows = db.rows()
  assert ('products', ('P1', 'lamp', 'red', 30, 4)) in rows
  address = '1 Oak Street'
  assert ('orders', ('W1', 'U1', 'P1', 'cancelled', 0, address, 'late')) in rows
  assert ('orders', ('W2', 'U1', 'P3', 'returned', 31, address, '')) in rows
  # Every tool that writes is marked, and no other.
  marked = {name for name, tool in tools.TOOLS.items() if tool.writes}
  assert marked == {*_WRITES, tools.CLOSE}


def test_tools_do_not_check_the_policy(start):
  products = [(*row[:4], 0) for row in TABLES['products']]
  sold_out = dataclasses.replace(
    EXCHANGE, allowed=False, tables=TABLES | {'products': products}
  )
  env, _ = start(sold_out)
  exchanged = env.step(expert.respond(EXCHANGE.call)).observation
  assert exchanged.text == 'exchanged'
  assert not env.step(DONE).success


_WRITES = ('cancel_order', 'return_order', 'change_address', 'exchange_order')


@pytest.mark.parametrize(
  ('response', 'text'),
  [
    ('', 'Error: no response'),
    ('<tool_call>{"name": "x"', 'Error: a <tool_call> tag has no partner'),
    (_call('fly'), 'Error: there is no tool fly'),
    (_call('get_order'), 'Error: get_order needs order_id'),
    (_call('get_order', order_id='W1', x='1'), 'Error: get_order needs order'),
    (_call('get_order', order_id=1), 'Error: the arguments of get_order must'),
    (_call('get_order', order_id='\ud800'), 'Error: a malformed tool call'),
  ],
)
def test_invalid_responses_change_nothing(start, response, text):
  env, first = start(EXCHANGE)
  result = env.step(response)
  assert not result.valid and not result.reward
  assert result.observation.text.startswith(text)
  assert result.observation.anchor == first.anchor


def test_an_invalid_action_is_the_end_of_its_response(start):
  env, _ = start(EXCHANGE)
  response = f'{"a" * 99}<tool_call>{{"name": "x"'
  assert env.step(response).action == response[-narrator.UNPARSED_CHARACTERS :]


def test_a_response_with_several_calls(start):
  env, _ = start(EXCHANGE)
  result = env.step(FIND + _call('fly') + _call('find_order') + ORDER)
  assert result.valid
  assert [message.text for message in result.observation.messages] == [
    '{"user_id": "U1"}',
    'Error: there is no tool fly',
    'Error: find_order needs user_id, product',
    '{"order_id": "W1", "status": "pending"}',
  ]
  # The ninth call is ignored.
  exchange = expert.respond(EXCHANGE.call)
  results = [env.step(FIND * n + exchange) for n in (8, 7)]
  assert [len(r.observation.messages) for r in results] == [8, 8]
  assert ['exchanged' in r.observation.text for r in results] == [False, True]


def test_the_user_answers_what_is_asked(start):
  env, _ = start(EXCHANGE)
  answers = [
    env.step(question).observation.text
    for question in ('Your zip code, please.', 'Which colour?', 'Where to?')
  ]
  assert answers == [
    'I am Ann Bell, zip code 111.',
    'blue',
    'I have told you: I want my lamp in another option.',
  ]


def test_anchors_are_what_is_known_and_changed(start):
  def play(*responses):
    env, first = start(EXCHANGE)
    anchors = [first.anchor]
    anchors += [env.step(r).observation.anchor for r in responses]
    return anchors

  who, option = 'Who are you?', 'Which option?'
  # The order of inquiries and repeated or failed calls do not matter.
  one = play(who, option, FIND, ORDER)
  other = play(ORDER, FIND, FIND, who, _call('fly'), option)
  assert one[-1] == other[-1]
  assert len(set(one)) == 5 and len(set(other)) == 5
  # A change of the database that is undone leaves no trace.
  there, back = (
    _call('exchange_order', order_id='W1', product_id=p) for p in ('P2', 'P1')
  )
  plain, changed, undone = play(there, back)
  assert plain == undone != changed
  # What one tool shows is not what another shows.
  assert play(FIND)[-1] != play(ORDER)[-1]


def test_brief_messages_repeat_what_is_known(start):
  env, first = start(EXCHANGE, prompt_style='brief')
  assert first.text == EXCHANGE.request and not first.tools
  observations = [
    env.step(response).observation
    for response in ('Who are you?', 'Why?', FIND, FIND, _call('fly'))
  ]
  roles = [[m.role for m in shown.messages] for shown in observations]
  assert roles == [['user'], ['user'], ['tool'], ['tool'], ['user']]
  texts = [shown.text for shown in observations]
  asked = f'{EXCHANGE.request}\nI am Ann Bell, zip code 111.'
  with_user = f'{asked}\n{{"user_id": "U1"}}'
  assert texts == [
    asked,
    f'{asked}\nI have told you: {EXCHANGE.request}',
    *(with_user, with_user),
    f'{with_user}\nError: there is no tool fly',
  ]


def test_brief_calls_leave_out_what_is_known(start):
  names = ('find_user', 'find_order', 'find_product', 'exchange_order')
  find_user, find_order, find_product, exchange = map(_call, names)
  env, _ = start(EXCHANGE, prompt_style='brief')
  early = env.step(find_order)
  assert not early.valid
  assert early.observation.text.endswith(
    'Error: find_order needs user_id, product'
  )
  inquiries = ['Who are you?', find_user, find_order, 'Which option?']
  for response in [*inquiries, find_product, exchange]:
    assert env.step(response).valid
  assert env.step(DONE).success
  # A call that has an argument keeps it, also a wrong one.
  env, _ = start(EXCHANGE, prompt_style='brief')
  env.step('Who are you?')
  result = env.step(_call('find_user', zip_code='222'))
  assert '"zip_code": "222"' in result.action and 'Ann Bell' in result.action
  # The option of the order is not the one that the user wants.
  env.step(_call('get_order', order_id='W1'))
  assert not env.step(find_product).valid
  # With definitions, calls must be complete.
  env, _ = start(EXCHANGE)
  env.step('Who are you?')
  assert not env.step(find_user).valid


def test_brief_anchors_have_the_latest_arguments(start):
  # Calls that leave out the product id mean the product shown last.
  lamp, chair = (
    _call('find_product', product=product, option=option)
    for product, option in (('lamp', 'blue'), ('chair', 'red'))
  )
  anchors = {}
  for style in ('brief', 'paper'):
    env, _ = start(EXCHANGE, prompt_style=style)
    anchors[style] = [
      env.step(r).observation.anchor for r in (lamp, chair, lamp)
    ]
  chair_last, lamp_last = anchors['brief'][1:]
  assert chair_last != lamp_last
  chair_last, lamp_last = anchors['paper'][1:]
  assert chair_last == lamp_last


def test_the_step_limit_ends_the_episode(start):
  env, _ = start(EXCHANGE, max_steps=2)
  first, last = env.step('Hello'), env.step('Hello?')
  assert not first.done and last.done and not last.success
  assert last.final_anchor == first.observation.anchor


def test_the_expert_solves_every_kind_of_case():
  info = envs.tasks('helpdesk', 'test')
  lengths = {}
  env = envs.make('helpdesk', prompt_style='brief')
  for index in range(60):
    steps = list(env.demonstrate(base.Task('test', index), noise=0, seed=0))
    assert env._db.rows() == env._goal
    assert all(message.role != 'system' for message in steps[0][0].messages)
    case = env._case
    assert info.task_type(index) == case.task_type
    lengths.setdefault((case.kind, case.allowed), set()).add(len(steps))
  # A refused cancellation needs no reason: the order shows its status.
  assert lengths == {
    ('cancel', True): {6},
    ('cancel', False): {4},
    ('address', True): {6},
    ('return', True): {6},
    ('return', False): {5},
    ('exchange', True): {7},
    ('exchange', False): {6},
  }


def test_a_noisy_expert_errs_and_stops_after_a_wrong_change():
  env, won = envs.make('helpdesk'), []
  # In case 76, the order of another user is returned.
  for index in range(60, 90):
    for _ in env.demonstrate(base.Task('train', index), noise=0.4, seed=1):
      assert env._db.rows() <= env._start | env._goal
    won.append(env._db.rows() == env._goal)
  assert 5 < sum(won) < 25


def test_mistakes_have_a_fixed_order():
  known = {'told option': 'blue', 'get_order': '"option": "red"'}
  options = [
    choice.arguments['option']
    for choice in expert.choices(EXCHANGE, known)
    if isinstance(choice, tool_calls.Call) and choice.name == 'find_product'
  ]
  assert options == ['red', 'blue']  # As in the table.
  # Without knowledge there are no ids to call tools with.
  *asked, close, refuse = expert.choices(EXCHANGE, {})
  assert len(asked) == 4 and close.name == refuse.name == tools.CLOSE


def test_cases_depend_on_split_index_and_seed_only():
  first = envs.make('helpdesk').reset(TASK)
  used = envs.make('helpdesk')
  used.reset(base.Task('train', 4))
  assert used.reset(TASK) == first
  helpdesk._case.cache_clear()
  assert envs.make('helpdesk').reset(TASK) == first
  rows = {
    split: {
      frozenset(helpdesk._case(envs.tasks('helpdesk', split)[n], 3).goal())
      for n in range(40)
    }
    for split in ('train', 'valid', 'test')
  }
  for one, other in itertools.combinations(rows.values(), 2):
    assert len(one) == 40 and not one & other


def test_options_of_the_generator():
  seeds = [
    envs.tasks('helpdesk', 'train', generator={'seed': seed})[0]
    for seed in (0, 1)
  ]
  assert seeds[0] != seeds[1]
  env = envs.make('helpdesk', generator={'users': 5})
  env.reset(TASK)
  assert len(env._db.find('users')) == 5


def test_requests_against_the_policy_differ_from_the_others():
  checked, counts = set(), set()
  for seed in range(100):
    case = cases.generate(seed)
    db = database.Database(case.tables)
    (order,) = db.find('orders', order_id=case.call.arguments['order_id'])
    if case.kind == 'cancel':
      assert order['status'] == ('pending' if case.allowed else 'shipped')
    elif case.kind == 'exchange':
      wanted = case.call.arguments['product_id']
      (product,) = db.find('products', product_id=wanted)
      assert order['status'] == 'pending'
      assert product['stock'] == (3 if case.allowed else 0)
    checked.add((case.kind, case.allowed))
    # All users have orders.
    for user in db.find('users'):
      counts.add(len(db.find('orders', user_id=user['user_id'])))
  assert len(checked) == 7 and counts == {2, 3}


def test_returns_are_allowed_up_to_the_last_day():
  days: dict[bool, set[int]] = {True: set(), False: set()}
  for seed in range(2000):
    case = cases.generate(seed)
    if case.kind == 'return':
      own = case.call.arguments['order_id']
      (order,) = (row for row in case.tables['orders'] if row[0] == own)
      days[case.allowed].add(order[4])
  assert days == {True: {*range(1, 31)}, False: {*range(31, 61)}}


def test_a_new_address_differs_from_the_old_one():
  case = cases.generate(envs.tasks('helpdesk', 'valid')[14])
  (call,) = [x for x in case.solution if x.name == 'change_address']
  (order,) = [
    row for row in case.tables['orders'] if row[0] == call.arguments['order_id']
  ]
  assert call.arguments['address'] != order[5]


def test_two_users_share_their_name():
  for seed in range(20):
    case = cases.generate(seed, 4)
    users = case.tables['users']
    assert len(users) == 4 and users[0][1] == users[1][1] == case.name
    assert len({user[2] for user in users}) == 4
    # The product of the request identifies one order of the user.
    names = {row[0]: row[1] for row in case.tables['products']}
    mine = [names[o[2]] for o in case.tables['orders'] if o[1] == case.user_id]
    assert mine.count(case.product) == 1


@pytest.mark.parametrize(
  ('options', 'line'),
  [
    ({'generator': {'users': 1}}, 'env.generator.users=1: out of range; must'),
    ({'generator': {'colour': 1}}, 'env.generator.colour=1: unknown; must be'),
    ({'generator': {'seed': 1001}}, 'env.generator.seed=1001: out of range'),
    ({'max_steps': 0}, 'env.max_steps=0: out of range; must be an integer'),
    ({'max_steps': 1}, 'env.max_steps=1: out of range; must be an integer'),
  ],
)
def test_wrong_options_are_refused(options, line):
  (problem,) = envs.check_options('helpdesk', options)
  assert problem.startswith(line)
