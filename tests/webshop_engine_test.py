"""Tests of pages, goals, rewards and damaged data, with three products."""

import dataclasses
import io
import json
import math
import random
import subprocess
import sys
import types

import numpy as np
import pytest

from envs.webshop import engine, goals, products, reward, titles

MUG = {
  'asin': 'B000000001',
  'name': 'Red Coffee Mug, 2 Pack',
  'full_description': 'Holds <b>coffee</b>.',
  'small_description': ['Dishwasher safe ', ''],
  'pricing': '$9.5',
  'customization_options': {
    'Color': [{'value': ' Wine Red '}, {'value': 'Black/White'}],
    'Size': [{'value': 'Large'}, {'value': "12' features"}],
    'Nothing': None,
  },
  'category': 'garden',
  'query': ' Coffee Mugs ',
  'product_category': 'Home & Kitchen › Dining › Mugs',
}
LAMP = {
  'asin': 'B000000002',
  'name': 'Desk lamp',
  'full_description': '',
  'small_description': 'One paragraph',
  'pricing': '$1,010.00 - $1,020.00',
  'customization_options': '',
  'category': 'electronics',
  'query': 'lamps',
  'product_category': 'Electronics › Lamps',
}
RACK = {
  'asin': 'B000000003',
  'name': 'Mug rack',
  'pricing': '',
  'customization_options': {
    'kind': [{'value': 'features'}, {'value': 'twice'}],
    'other': [{'value': 'twice'}],
  },
  'category': 'garden',
  'query': 'racks',
  'product_category': 'Home & Kitchen › Dining › Racks',
}
INSTRUCTIONS = {
  MUG['asin']: {
    'attributes': ['dishwasher safe', 'gift'],
    'instruction': 'Find me dishwasher safe mugs',
    'instruction_attributes': ['dishwasher safe'],
  },
  LAMP['asin']: {
    'attributes': ['easy'],
    'instruction': 'Find me easy lamps',
    'instruction_attributes': ['easy'],
  },
  RACK['asin']: {'attributes': []},
}
HUMAN = {
  MUG['asin']: [
    {
      'instruction': 'i want a red mug.',
      'instruction_attributes': ['dishwasher safe'],
      'instruction_options': ['wine red'],
    },
    {'instruction': 'no attributes', 'instruction_attributes': []},
  ]
}


@pytest.fixture(scope='module')
def catalogue():
  return products.from_records([MUG, LAMP, RACK], INSTRUCTIONS, HUMAN)


def find_goal(catalogue, asin=MUG['asin'], **options):
  return next(
    goal
    for goal in goals.build(catalogue)
    if goal.asin == asin and options.items() <= dict(goal.goal_options).items()
  )


def open_session(catalogue, observation='text', goal=None, **kwargs):
  shop = engine.Shop(catalogue, observation=observation, **kwargs)
  session = engine.Session(shop)
  session.reset(goal or find_goal(catalogue))
  return session


def test_cleaning(catalogue):
  mug = catalogue[0]
  assert mug.options == {
    'color': ('wine red', 'black | white'),
    'size': ('large', "12' features"),
  }
  assert mug.prices == (9.5,) and mug.price_tag == '$9.5'
  assert mug.query == 'coffee mugs'
  assert catalogue[1].bullets == ('One paragraph',)
  assert catalogue[1].prices == (1010.0, 1020.0)
  assert catalogue[1].price_tag == '$1010.0 to $1020.0'
  assert catalogue[2].price_tag == '$100.0'
  assert catalogue.find('B000000003') == 2
  assert catalogue.find('B000000009') is None
  assert mug.text() == (
    'red coffee mug, 2 pack holds <b>coffee</b>. dishwasher safe  color: wine '
    "red, black | white, and size: large, 12' features"
  )


def test_goals_worked_out_by_hand(catalogue):
  rng = random.Random(0)
  lamp_price = rng.uniform(1010.0, 1020.0)
  ceiling = sorted(rng.sample([10.0, 20.0, 30.0, 40.0], 2))[1]
  built = goals.build(catalogue, seed=0)
  # Four combinations of the mug's options, and the lamp, whose price is above
  # every price limit.
  assert len(built) == 5
  mug = next(
    g
    for g in built
    if g.goal_options
    == {
      'color': 'wine red',
      'size': 'large',
    }
  )
  assert mug.instruction_text == (
    'Find me dishwasher safe mugs with color: wine red, and size: large, and '
    f'price lower than {ceiling:.2f} dollars'
  )
  assert mug.price_upper == ceiling
  assert mug.weight == 0.25  # one attribute, which four goals have
  assert goals._weight((), {}) == 0
  lamp = next(g for g in built if g.asin == LAMP['asin'])
  assert lamp.instruction_text == 'Find me easy lamps'
  assert lamp.price_upper == goals.NO_CEILING
  assert goals.prices(catalogue)[1] == lamp_price
  order = list(range(5))
  random.Random(233).shuffle(order)
  assert order.index(4) == built.index(lamp)


def test_human_written_goals(catalogue):
  (goal,) = goals.build(catalogue, human=True)
  assert goal.instruction_text.startswith('i want a red mug, and price lower')
  assert goal.goal_options == ('wine red',)


def test_reference_goals_depend_on_the_seed(catalogue):
  a, b, repeated = (goals.reference(catalogue, seed=s) for s in (1, 2, 1))
  assert a == repeated
  assert a != b and len(a) == len(b) == 5


def test_search_and_result_pages_worked_out_by_hand(catalogue):
  goal = find_goal(catalogue, color='wine red', size='large')
  session = open_session(catalogue, goal=goal)
  task = f'Instruction: [SEP] {goal.instruction_text} [SEP] '
  page = session.step('nonsense')
  assert page.text == f'WebShop [SEP] {task}Search'
  assert page.has_search_bar and page.clickables == ('search',)
  assert session.step('click[search]') == page
  page = session.step('search[Mug]')
  # The product with the shorter text ranks first.
  assert page.text == (
    f'{task}Back to Search [SEP] Page 1 (Total results: 2) [SEP] Next > [SEP] '
    'B000000003 [SEP] Mug rack [SEP] $100.0 [SEP] B000000001 [SEP] Red Coffee '
    'Mug, 2 Pack [SEP] $9.5'
  )
  assert page.clickables == (
    'back to search',
    'next >',
    'b000000003',
    'b000000001',
  )
  assert page.url.endswith('/search_results/0/mug/1')
  page = session.step('click[NEXT >]')
  assert page.text == (
    f'{task}Back to Search [SEP] Page 2 (Total results: 2) [SEP] < Prev [SEP] '
    'Next >'
  )
  assert session.step('click[< prev]').clickables[-1] == 'b000000001'


def test_product_pages_worked_out_by_hand(catalogue):
  goal = find_goal(catalogue, color='wine red', size='large')
  session = open_session(catalogue, goal=goal)
  task = f'Instruction: [SEP] {goal.instruction_text} [SEP] '
  session.step('search[Mug]')
  page = session.step('click[b000000001]')
  assert page.text == (
    f'{task}Back to Search [SEP] < Prev [SEP] color [SEP] wine red [SEP] '
    "black | white [SEP] size [SEP] large [SEP] 12' features [SEP] Red Coffee "
    'Mug, 2 Pack [SEP] Price: $9.5 [SEP] Rating: N.A. [SEP] Description [SEP] '
    'Features [SEP] Reviews [SEP] Buy Now'
  )
  assert page.clickables[-4:] == (
    'wine red',
    'black | white',
    'large',
    "12' features",
  )
  assert session.step('click[wine red]').text == page.text
  assert session.step('click[large]').url.endswith(
    '/item_page/0/B000000001/mug/1/{"color": "wine red", "size": "large"}'
  )
  page = session.step('click[description]')
  assert page.text == (
    f'{task}Back to Search [SEP] < Prev [SEP] Holds <b>coffee</b>.'
  )
  assert page.url.endswith(
    "/Description/{'color': 'wine red', 'size': 'large'}"
  )
  page = session.step('click[< prev]')
  assert '"size": "large"' in page.url
  page = session.step('click[buy now]')
  assert page.done and page.reward == 1.0 and page.clickables == ()
  assert page.reward_parts == {
    'r_type': 1.0,
    'r_att': 1.0,
    'r_option': 1.0,
    'r_price': True,
  }
  assert page.text.startswith('Thank you for shopping with us! [SEP] Your code')
  assert session.step('search[mug]') == page


def test_rich_text_marks_clicked_options_and_links(catalogue):
  session = open_session(catalogue, 'text_rich')
  session.step('search[mug rack]')
  session.step('click[b000000001]')
  page = session.step('click[wine red]')
  assert page.text.startswith('You have clicked wine red.\nInstruction:\n')
  assert '\n  [clicked button] wine red [clicked button_]\n' in page.text
  assert '\n  [button] large [button_]\n' in page.text
  page = session.step('click[< prev]')
  assert '\n\n[clicked button] B000000001 [clicked button_]\n' in page.text
  assert '\n\n[button] B000000003 [button_]\n' in page.text
  session.step('click[back to search]')
  page = session.step('search[mug rack]')
  assert '[clicked' not in page.text
  session.step('click[b000000001]')
  page = session.step('click[features]')
  # Strings of spaces become lines of their own.
  assert page.text.endswith('[button] < Prev [button_]\n Dishwasher safe \n \n')


def test_search_works_on_any_page_and_clears_options(catalogue):
  session = open_session(catalogue)
  session.step('search[mug]')
  session.step('click[b000000001]')
  page = session.step('click[large]')
  assert (page.product, page.options) == ('B000000001', {'size': 'large'})
  page = session.step('search[lamp]')
  assert page.url.endswith('/search_results/0/lamp/1')
  assert (page.product, page.options) == ('', {})
  page = session.step('click[b000000002]')
  assert page.url.endswith('/item_page/0/B000000002/lamp/1/{}')
  assert session.step('click[< prev]').url.endswith('/lamp/1')
  # A search without argument does nothing. Words are split at single spaces.
  assert session.step('search[]').url.endswith('/lamp/1')
  assert session.step('search[a  b]').url.endswith('/a++b/1')


def test_back_to_search_clears_product_and_options(catalogue):
  session = open_session(catalogue)
  for action in ('search[mug]', 'click[b000000001]', 'click[large]'):
    session.step(action)
  page = session.step('click[back to search]')
  assert (page.product, page.options) == ('', {})


@pytest.mark.parametrize(
  ('action', 'url'),
  [
    ('search[mug] now', '/search_results/0/mug/1'),
    ('search[mug]]', '/search_results/0/mug]/1'),
    # The argument starts at the last bracket: this is no search.
    ('search[red [mug]]', '/0'),
  ],
)
def test_actions_are_split_as_in_the_original(catalogue, action, url):
  page = open_session(catalogue).step(action)
  assert page.url == f'http://127.0.0.1:3000{url}'


def test_words_of_a_query_may_name_a_page(catalogue):
  # The original looks for the page in the URL, which has the query.
  session = open_session(catalogue)
  session.step('search[mug item_page]')
  assert session.step('click[next >]').url.endswith('/mug+item_page/2')
  session.step('search[mug search_results]')
  session.step('click[b000000001]')
  page = session.step('click[< prev]')
  assert page.url.endswith('/mug+search_results/0')
  assert page.clickables == ('back to search', 'next >')


@pytest.fixture(scope='module', name='mugs')
def fixture_mugs():
  """Returns a catalogue of sixty mugs."""
  return products.from_records(
    [MUG | {'asin': f'B0000001{n:02}'} for n in range(60)], {}
  )


def page_through(session, action):
  """Returns the products of the pages of a search, page by page."""
  shown, page = [], session.step(action)
  while links := [c for c in page.clickables if c.startswith('b0')]:
    shown.append(links)
    page = session.step('click[next >]')
  return shown


def test_pages_of_ten_of_at_most_fifty_results(catalogue, mugs):
  session = open_session(mugs, goal=find_goal(catalogue))
  shown = page_through(session, 'search[mug]')
  assert [len(links) for links in shown] == [10] * 5
  assert len({link for links in shown for link in links}) == 50
  page = session.step('click[< prev]')
  assert page.clickables[3:] == tuple(shown[4])
  # A product's page leads back to its page of results.
  session.step('search[mug]')
  session.step('click[next >]')
  session.step(f'click[{shown[1][0]}]')
  page = session.step('click[< prev]')
  assert page.url.endswith('/mug/2')
  assert page.clickables[3:] == tuple(shown[1])


def test_random_products_differ_by_search_and_seed(catalogue, mugs):
  first, again, other = (
    open_session(mugs, goal=find_goal(catalogue), seed=seed)
    for seed in (0, 0, 1)
  )
  shown = page_through(first, 'search[<r>]')
  assert [len(links) for links in shown] == [10] * 5
  assert len({link for links in shown for link in links}) == 50
  assert page_through(again, 'search[<r>]') == shown
  assert page_through(other, 'search[<r>]') != shown
  assert page_through(first, 'search[<r>]') != shown
  first.reset(find_goal(catalogue))
  assert page_through(first, 'search[<r>]') == shown


def test_option_with_the_name_of_a_button(catalogue):
  session = open_session(catalogue)
  session.step('search[rack]')
  page = session.step('click[b000000003]')
  assert page.clickables.count('features') == 1
  # As in the original, the option acts as the button.
  assert '/Features/' in session.step('click[features]').url
  session.step('click[< prev]')
  # A value of two options sets the last option.
  assert session.step('click[twice]').url.endswith('{"other": "twice"}')


def test_options_that_read_like_other_buttons(catalogue):
  values = [{'value': 'Buy Now'}, {'value': 'Back to Search'}]
  rack = RACK | {'customization_options': {'kind': values}}
  session = open_session(
    products.from_records([rack], {}), goal=find_goal(catalogue)
  )
  actions = ('search[rack]', 'click[b000000003]', 'click[back to search]')
  assert [session.step(action) for action in actions][-1].has_search_bar
  actions = (*actions[:2], 'click[buy now]')
  assert [session.step(action) for action in actions][-1].done


def test_a_description_of_a_line_break_is_not_shown(catalogue):
  mug = MUG | {'full_description': '\n'}
  session = open_session(
    products.from_records([mug], {}), goal=find_goal(catalogue)
  )
  session.step('search[mug]')
  session.step('click[b000000001]')
  assert session.step('click[description]').text.endswith('[SEP] < Prev')


def test_unknown_observation_modes_are_refused(catalogue):
  with pytest.raises(ValueError, match='observation=x: must be one of text, t'):
    engine.Shop(catalogue, observation='x')


def test_the_attributes_page(catalogue):
  session = open_session(catalogue, show_attributes=True)
  session.step('search[mug]')
  page = session.step('click[b000000001]')
  assert 'attributes' in page.clickables
  page = session.step('click[attributes]')
  assert page.text.split(' [SEP] ')[4:] == [
    *catalogue[0].attributes,
    'garden',
    'coffee mugs',
    'Home & Kitchen › Dining › Mugs',
  ]
  rich = open_session(catalogue, 'text_rich', show_attributes=True)
  rich.step('search[mug]')
  rich.step('click[b000000001]')
  first = catalogue[0].attributes[0]
  assert f'\n {first}\n' in rich.step('click[attributes]').text
  # A product without an entry in the file of attributes.
  bare = products.from_records([LAMP], {})
  assert bare[0].attributes == ('DUMMY_ATTR',)


def test_special_searches(catalogue):
  session = open_session(catalogue)

  def results(action):
    return [c for c in session.step(action).clickables if c.startswith('b0')]

  assert results('search[<q> lamps]') == ['b000000002']
  assert results('search[<c> garden]') == ['b000000001', 'b000000003']
  assert results('search[<c> garden mugs]') == ['b000000001', 'b000000003']
  assert results('search[<a> gift]') == ['b000000001']
  assert results('search[<c>]') == []
  assert sorted(results('search[<r>]')) == [
    'b000000001',
    'b000000002',
    'b000000003',
  ]


def test_rewards_worked_out_by_hand(catalogue):
  mug, lamp, rack = catalogue
  goal = find_goal(catalogue, color='wine red', size='large')
  bought = {'color': 'wine red', 'size': 'large'}
  assert reward.score(mug, goal, price=9.5, options=bought)[0] == 1.0
  limit = goal.price_upper
  assert reward.score(mug, goal, price=limit, options=bought)[0] == 1.0
  # Price above the limit: (1 + 2 + 0) / (1 + 2 + 1).
  assert reward.score(mug, goal, price=999.0, options=bought)[0] == 0.75
  # No options: (1 + 0 + 1) / 4.
  assert reward.score(mug, goal, price=9.5, options={})[0] == 0.5
  # 'cherry red' and 'wine red' are both red; the size is missing.
  other = {'color': 'cherry red'}
  assert reward.score(mug, goal, price=9.5, options=other)[0] == 0.75
  # The titles have no noun in common: the score is 0.
  score, parts = reward.score(lamp, goal, price=9.5, options=bought)
  assert score == 0 and parts['r_type'] == 0
  # One noun of three, 'mug', in common: the title score is above 0.2.
  _, parts = reward.score(rack, goal, price=9.5, options={})
  assert parts['r_type'] == 1.0


@pytest.mark.parametrize(
  ('title_score', 'shared', 'expected'),
  [
    (0.09, 'Home & Kitchen › Dining', 0.1),
    (0.1, 'Home & Kitchen', 0.5),
    (0.1, 'Home & Kitchen › Dining', 1.0),
    (0.2, 'Home & Kitchen', 0.5),
    (0.21, '', 1.0),
  ],
)
def test_type_scores_worked_out_by_hand(
  catalogue, monkeypatch, title_score, shared, expected
):
  monkeypatch.setattr(titles, 'overlap', lambda *_: title_score)
  goal = find_goal(catalogue, color='wine red', size='large')
  goal = dataclasses.replace(
    goal, query='cups', product_category=f'{shared} › Cups'
  )
  assert reward.type_score(catalogue[0], goal) == expected


def test_the_price_drawn_from_the_range_is_paid(catalogue):
  goal = find_goal(catalogue, LAMP['asin'])
  lamp_prices = []
  for seed in (0, 1):
    price = engine.Shop(catalogue, seed=seed).price(1)
    assert price == goals.prices(catalogue, seed=seed)[1]
    for limit, is_paid in ((price - 0.01, False), (price, True)):
      limited = dataclasses.replace(goal, price_upper=limit)
      session = open_session(catalogue, goal=limited, seed=seed)
      for action in ('search[lamp]', 'click[b000000002]'):
        session.step(action)
      parts = session.step('click[buy now]').reward_parts
      assert parts['r_price'] == is_paid
    lamp_prices.append(price)
  assert lamp_prices[0] != lamp_prices[1]


def test_receipts_have_the_options_as_json_in_html(catalogue):
  session = open_session(catalogue)
  for action in (
    'search[mug]',
    'click[b000000001]',
    "click[12' features]",
    'click[wine red]',
  ):
    session.step(action)
  options = '{"color": "wine red", "size": "12\\u0027 features"}'
  assert f'[SEP] {options} [SEP]' in session.step('click[buy now]').text
  escaped = engine._json_in_html({'a': '<b> & c'})
  assert escaped == '{"a": "\\u003cb\\u003e \\u0026 c"}'


def test_wanted_pairs_are_compared_as_text():
  assert reward.option_hits(['large'], [('size', '4x-large')]) == 1
  assert reward.option_hits(['4x-large'], [('size', 'large')]) == 0
  assert reward.option_hits(['color'], [('color', 'wine red')]) == 1
  assert reward.option_hits(['small', 'huge'], ['huge']) == 1


def test_plain_colors():
  assert reward.plain_color('dark wine red') == 'dark'
  assert reward.plain_color('wine red') == 'red'
  assert reward.plain_color('washed') == 'ash'
  assert reward.plain_color(('color', 'wine red')) == ('color', 'wine red')
  assert reward.plain_color(('color', 'red')) == 'red'
  assert reward.plain_color('huge') == 'huge'


def test_titles_are_split_like_spacys_tokens():
  # Expected: the tokens of spacy.blank('en') in spaCy 3.8.
  title = "Women's 12oz 5.5ft Shoes/Boots (2 Pack), Co-op 3-Piece R&B 90% A.B."
  expected = (
    "Women 's 12 oz 5.5 ft Shoes / Boots ( 2 Pack ) , Co - op 3 - Piece"
  )
  assert titles.words(title) == [*expected.split(), *'R&B 90 % A.B.'.split()]


def test_each_word_is_tagged_alone():
  assert titles.nouns('The lamp, very tall 12oz Lamp') == ('lamp', 'oz', 'lamp')


def test_the_originals_tagger_is_used_if_installed(monkeypatch):
  def load(name):
    assert name == 'en_core_web_sm'
    pos = {'Tall': 'ADJ', 'Desk': 'PROPN', 'lamp': 'NOUN', 'shines': 'VERB'}
    token = types.SimpleNamespace
    return lambda title: [token(text=w, pos_=pos[w]) for w in title.split()]

  fake = types.SimpleNamespace(load=load)
  monkeypatch.setitem(sys.modules, 'spacy', fake)
  installed = types.SimpleNamespace(
    find_spec=lambda name: name == 'en_core_web_sm'
  )
  monkeypatch.setattr(titles.importlib, 'util', installed)
  titles.tagger.cache_clear()
  try:
    assert titles.tagger()('Tall Desk lamp shines') == ('desk', 'lamp')
  finally:
    titles.tagger.cache_clear()


def test_title_overlap():
  assert titles.overlap('Desk lamp', 'Desk lamp') == 1.0
  assert titles.overlap('mug', '') == 0.2
  # A repeated noun counts twice in the denominator: {mug} of (mug, mug).
  assert titles.overlap('mug', 'mug mug') == 0.5


@pytest.mark.parametrize(
  ('damage', 'kept'),
  [
    ({'asin': None}, False),
    ({'asin': 'B0000000011'}, False),
    ({'name': 5}, False),
    ({'pricing': None}, True),
    ({'pricing': '$free - $'}, True),
    ({'customization_options': ['x']}, True),
    ({'customization_options': {'a': [None, {'value': 3}]}}, True),
    ({'small_description': None}, True),
    ({'full_description': 7}, True),
    ({'product_category': None}, True),
    ({'name': '<b>Mug</b> 😀 \ud83d \x00'}, True),
  ],
)
def test_damaged_records_are_skipped_or_repaired(damage, kept):
  catalogue = products.from_records([MUG | damage, LAMP], INSTRUCTIONS)
  assert len(catalogue) == 1 + kept
  assert catalogue.skipped == 1 - kept
  session = open_session(catalogue, goal=find_goal(catalogue, LAMP['asin']))
  for action in ('search[mug 😀]', 'click[b000000001]', 'click[features]'):
    session.step(action)
  session.step('search[lamp]')
  session.step('click[b000000002]')
  assert session.step('click[buy now]').reward == 1.0


def test_invalid_and_duplicate_records_are_counted():
  catalogue = products.from_records([None, MUG, 'x', MUG], {})
  assert (len(catalogue), catalogue.skipped) == (1, 3)
  with pytest.raises(ValueError, match='no valid product in it'):
    products.from_records([], {})


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.setenv('GIGPO_JAX_CACHE', str(tmp_path / 'cache'))
  monkeypatch.delenv('WEBSHOP_DATA', raising=False)
  data = tmp_path / 'data'
  data.mkdir()
  (data / 'items_shuffle_1000.json').write_text(json.dumps([MUG, LAMP, RACK]))
  (data / 'items_ins_v2_1000.json').write_text(json.dumps(INSTRUCTIONS))
  return data


def fail_if_called(*_):
  raise AssertionError('read again')


def test_files_and_their_cache(folder, catalogue, monkeypatch):
  first = products.load(folder)
  assert list(first) == [
    *(products.clean(r, INSTRUCTIONS[r['asin']]) for r in (MUG, LAMP, RACK))
  ]
  # The second time, the cache is used: the files are not read.
  monkeypatch.setattr(products, '_read_files', fail_if_called)
  assert list(products.load(folder)) == list(first)
  assert first.index.search('mug', 50) == [2, 0]
  # Changed files get a new cache folder.
  monkeypatch.undo()
  monkeypatch.setenv('GIGPO_JAX_CACHE', str(folder / 'cache'))
  (folder / 'items_shuffle_1000.json').write_text(json.dumps([LAMP]))
  assert len(products.load(folder)) == 1


@pytest.mark.parametrize(
  ('name', 'text', 'message'),
  [
    ('items_shuffle_1000.json', '[{"asin": "B0', 'not a complete JSON list'),
    ('items_shuffle_1000.json', '[]', 'no valid product in it'),
    ('items_shuffle_1000.json', '{}', 'not a complete JSON list'),
    ('items_shuffle_1000.json', '', 'not a complete JSON list'),
    ('items_shuffle_1000.json', '[{"asin": 3}]', '1 damaged'),
    ('items_ins_v2_1000.json', '{"a"', 'not JSON'),
    ('items_ins_v2_1000.json', '[]', 'not a JSON object'),
  ],
)
def test_damaged_files_are_errors_in_one_line(folder, name, text, message):
  (folder / name).write_text(text)
  with pytest.raises(ValueError, match=message) as error:
    products.load(folder)
  assert '\n' not in str(error.value)
  suffixes = [path.suffix for path in (folder.parent / 'cache').iterdir()]
  assert suffixes == ['.lock']


def test_lists_are_decoded_in_chunks(monkeypatch):
  records = [{'a': math.nan, 'b': 'é]\\"'}, [], -1.5, None, ['[', {}], 12, 3]
  for text in (json.dumps(records), json.dumps(records, indent=1)):
    for size in (1, 2, 7, 1_000):
      monkeypatch.setattr(products, '_CHUNK', size)
      # Compared as text, because NaN is not equal to itself.
      assert repr([*products._decode_items(io.StringIO(text))]) == repr(records)
      for cut in (text[:-1], text[: len(text) // 2], text.replace(',', ';')):
        with pytest.raises(ValueError, match='not a complete JSON list'):
          list(products._decode_items(io.StringIO(cut)))
  assert not [*products._decode_items(io.StringIO(' [ ] '))]


def test_skipped_records_are_reported_once(folder, capsys):
  (folder / 'items_shuffle_1000.json').write_text(json.dumps([MUG, 3, MUG]))
  assert products.load(folder).skipped == 2
  assert ': skipped 2 damaged or duplicate records' in capsys.readouterr().err
  assert products.load(folder).skipped == 2
  assert not capsys.readouterr().err


def test_goals_and_prices_are_cached(folder, monkeypatch):
  first = products.load(folder)
  assert list(goals.build(first))
  prices = goals.prices(first, seed=3)
  second = products.load(folder)
  monkeypatch.setattr(goals, '_draw_prices', fail_if_called)
  assert list(goals.build(second)) == list(goals.build(first))
  np.testing.assert_array_equal(goals.prices(second, seed=3), prices)


def test_a_partial_cache_of_a_killed_process_is_replaced(folder):
  cache_folder = products.load(folder)._folder
  partial_folder = cache_folder.with_name(f'{cache_folder.name}.part')
  cache_folder.rename(partial_folder)
  (partial_folder / 'asins.npy').write_bytes(b'half')
  assert len(products.load(folder)) == 3
  assert not partial_folder.exists()


def test_processes_share_one_cache(folder):
  program = (
    'from envs.webshop import products, goals; import sys;'
    'c = products.load(sys.argv[1]); print(c._folder, len(goals.build(c)))'
  )
  command = [sys.executable, '-c', program, str(folder)]
  processes = [
    subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for _ in range(3)
  ]
  outputs = {process.communicate(timeout=100)[0] for process in processes}
  assert [process.returncode for process in processes] == [0, 0, 0]
  assert len(outputs) == 1


def test_an_unwritable_cache_is_an_error(folder, monkeypatch):
  monkeypatch.setenv('GIGPO_JAX_CACHE', str(folder / 'items_ins_v2_1000.json'))
  with pytest.raises(ValueError, match='GIGPO_JAX_CACHE=.*cannot be used'):
    products.load(folder)


def test_damaged_human_instructions_are_skipped(folder):
  entry = {'instruction': 'A mug.', 'instruction_attributes': ['blue']}
  human = {MUG['asin']: 5, LAMP['asin']: [3, entry], RACK['asin']: None}
  (folder / 'items_human_ins.json').write_text(json.dumps(human))
  human_goals = goals.build(products.load(folder), human=True)
  (goal,) = human_goals
  assert goal.instruction_text.startswith('A mug') and goal.weight == 1.0


def test_missing_files_are_reported_with_the_download_command(folder):
  (folder / 'items_ins_v2_1000.json').unlink()
  with pytest.raises(ValueError, match=r'no items_ins_v2_1000.json.*download'):
    products.load(folder)
  with pytest.raises(ValueError, match=r'download.*WEBSHOP_DATA'):
    products.load(None)
