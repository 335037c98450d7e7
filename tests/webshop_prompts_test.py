"""Tests of WebShop's page parser, prompts and response parsing."""

import dataclasses
import gzip
import json

import pytest
import reference_data

from envs import narrator, turns
from envs.webshop import pages, prompts

TASK = 'Find me long lasting lip balms, and price lower than 30.00 dollars'
INDEX = f'WebShop [SEP] Instruction: [SEP] {TASK} [SEP] Search'
RESULTS = (
  f'Instruction: [SEP] {TASK} [SEP] Back to Search [SEP] Page 2 (Total '
  'results: 50) [SEP] < Prev [SEP] Next > [SEP] B01 [SEP] Alder Lip Balm with '
  'a title of more than ten words, Gift Box [SEP] $3.99 [SEP] B02 [SEP] Brisk '
  'Balm [SEP] $2.0 to $4.5'
)
RESULTS_CLICKABLES = ('back to search', '< prev', 'next >', 'b01', 'b02')
ITEM = (
  f'Instruction: [SEP] {TASK} [SEP] Back to Search [SEP] < Prev [SEP] size '
  '[SEP] small [SEP] 1 | 2 oz [SEP] color [SEP] red [SEP] Alder Lip Balm [SEP] '
  'Price: $3.99 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] '
  'Reviews [SEP] Buy Now'
)
ITEM_CLICKABLES = (
  'back to search',
  '< prev',
  'description',
  'features',
  'reviews',
  'buy now',
  'small',
  '1 | 2 oz',
  'red',
)
SUB_PAGE = (
  f'Instruction: [SEP] {TASK} [SEP] Back to Search [SEP] < Prev [SEP] Soft and '
  'sweet.'
)
SUB_PAGE_CLICKABLES = ('back to search', '< prev')


def _read(text: str, clickables: tuple[str, ...]) -> pages.View:
  return pages.read(pages.split(text, TASK), clickables)


def test_parsing_pages():
  assert _read(INDEX, ('search',)) == pages.View('index')
  assert _read(RESULTS, RESULTS_CLICKABLES) == pages.View(
    'results',
    buttons=('Back to Search', '< Prev', 'Next >'),
    page_number=2,
    products=(
      (
        'B01',
        'Alder Lip Balm with a title of more than ten words, Gift Box',
        '$3.99',
      ),
      ('B02', 'Brisk Balm', '$2.0 to $4.5'),
    ),
  )
  assert _read(ITEM, ITEM_CLICKABLES) == pages.View(
    'item',
    buttons=('Back to Search', '< Prev'),
    options={'size': ('small', '1 | 2 oz'), 'color': ('red',)},
    title='Alder Lip Balm',
    price='$3.99',
    actions=('Description', 'Features', 'Reviews', 'Buy Now'),
  )
  assert _read(SUB_PAGE, SUB_PAGE_CLICKABLES) == pages.View(
    'sub_page',
    buttons=('Back to Search', '< Prev'),
    lines=('Soft and sweet.',),
  )


@pytest.mark.parametrize('line', ['Buy Now', 'Search', 'Total results', TASK])
def test_a_bullet_point_may_read_like_another_part(line: str):
  page = _read(f'{SUB_PAGE} [SEP] {line}', SUB_PAGE_CLICKABLES)
  assert page.page_type == 'sub_page'
  assert page.lines == ('Soft and sweet.', line)


@pytest.mark.parametrize('name', ['Features', 'Price: size'])
def test_an_option_may_be_called_like_another_part(name: str):
  plain = _read(ITEM, ITEM_CLICKABLES)
  options = {name: plain.options['size'], 'color': plain.options['color']}
  page = _read(ITEM.replace('size', name), ITEM_CLICKABLES)
  assert page == dataclasses.replace(plain, options=options)


def test_blanks_around_an_instruction_do_not_matter():
  assert pages.split(INDEX, f' {TASK} ') == ['Search']


def test_parsing_products_without_a_title():
  title = 'Alder Lip Balm with a title of more than ten words, Gift Box [SEP] '
  untitled = RESULTS.replace(title, '').replace('Brisk Balm [SEP] ', '')
  assert _read(untitled, RESULTS_CLICKABLES).products == (
    ('B01', '', '$3.99'),
    ('B02', '', '$2.0 to $4.5'),
  )
  titled = _read(ITEM, ITEM_CLICKABLES)
  item = _read(ITEM.replace('Alder Lip Balm [SEP] ', ''), ITEM_CLICKABLES)
  assert item == dataclasses.replace(titled, title='')


def test_parsing_a_page_without_results():
  text = (
    f'Instruction: [SEP] {TASK} [SEP] Back to Search [SEP] Page 7 (Total '
    'results: 50) [SEP] < Prev [SEP] Next >'
  )
  view = _read(text, ('back to search', '< prev', 'next >'))
  assert view.products == () and view.page_number == 7


def test_actions():
  assert prompts.actions(True, ('search',)) == ('search[<your query>]',)
  assert prompts.actions(False, ('back to search', 'b01')) == (
    'click[back to search]',
    'click[b01]',
  )


@pytest.mark.parametrize(
  ('action', 'on_index', 'elsewhere'),
  [
    ('search[red shoes]', True, False),
    ('search[]', False, False),
    ('search[red', False, False),
    # As the shop reads them: the last bracket begins the argument.
    ('search[red [mug]]', False, False),
    ('search[red] please', True, False),
    ('click[B01]', False, True),
    ('click[b01]', False, True),
    ('click[search]', False, False),
    ('b01', False, False),
    ('', False, False),
  ],
)
def test_admissible_actions(action: str, on_index: bool, elsewhere: bool):
  first = prompts.actions(True, ('search',))
  second = prompts.actions(False, ('back to search', 'b01'))
  assert prompts.admits(first, action) == on_index
  assert prompts.admits(second, action) == elsewhere


def _parse(response: str, *, require_think: bool = True) -> tuple[str, bool]:
  return turns.parse(
    response,
    require_think=require_think,
    unparsed_characters=prompts.UNPARSED_CHARACTERS,
  )


def _build(
  text: str,
  clickables: tuple[str, ...],
  *,
  style: str,
  history: tuple[turns.Turn, ...] = (),
  step: int = 0,
  require_think: bool = True,
) -> str:
  return prompts.build(
    task=TASK,
    observation=prompts.describe(
      pages.split(text, TASK), clickables, style=style
    ),
    actions=prompts.actions(text == INDEX, clickables),
    history=history,
    step=step,
    style=style,
    require_think=require_think,
  )


def test_the_first_paper_prompt():
  assert _build(INDEX, ('search',), style='paper') == (
    'You are an expert autonomous agent operating in the WebShop e-commerce '
    'environment.\n'
    'Your task is to: Find me long lasting lip balms, and price lower than '
    '30.00 dollars.\n'
    "Your current observation is: 'Search'.\n"
    'Your admissible actions of the current situation are:\n'
    '[\n'
    "'search[<your query>]',\n"
    '].\n'
    '\n'
    'Now it is your turn to act. First reason step by step about the current '
    'situation, and think carefully which admissible action best advances the '
    'shopping goal. This reasoning must be enclosed within <think> </think> '
    'tags. Choose one admissible action for the current step and present it '
    'within <action> </action> tags.'
  )


def test_a_later_paper_prompt():
  history = (
    turns.Turn("'Search'", 'search[lip balms]'),
    turns.Turn("'Back to Search'", 'click[b01]'),
  )
  prompt = _build(
    ITEM,
    ITEM_CLICKABLES,
    style='paper',
    history=history,
    step=3,
    require_think=False,
  )
  assert prompt == (
    'You are an expert autonomous agent operating in the WebShop e-commerce '
    'environment.\n'
    'Your task is to: Find me long lasting lip balms, and price lower than '
    '30.00 dollars.\n'
    'Before this step, you have already taken 3 step(s). Here are the last 2 '
    'observation(s) and the action(s) you took:\n'
    "[Observation 2: ''Search'', Action 2: 'search[lip balms]']\n"
    "[Observation 3: ''Back to Search'', Action 3: 'click[b01]']\n"
    "You are now at step 4 and your current observation is: 'Back to Search' "
    "[SEP] '< Prev' [SEP] 'size' [SEP] 'small' [SEP] '1 | 2 oz' [SEP] 'color' "
    "[SEP] 'red' [SEP] 'Alder Lip Balm' [SEP] 'Price: $3.99' [SEP] 'Rating: "
    "N.A.' [SEP] 'Description' [SEP] 'Features' [SEP] 'Reviews' [SEP] 'Buy "
    "Now'.\n"
    'Your admissible actions of the current situation are:\n'
    '[\n'
    "'click[back to search]',\n"
    "'click[< prev]',\n"
    "'click[description]',\n"
    "'click[features]',\n"
    "'click[reviews]',\n"
    "'click[buy now]',\n"
    "'click[small]',\n"
    "'click[1 | 2 oz]',\n"
    "'click[red]',\n"
    '].\n'
    '\n'
    'Now it is your turn to act. Choose one admissible action for the current '
    'step and present it within <action> </action> tags.'
  )


def test_brief_prompts():
  head = f'Task: {TASK}\n'
  assert _build(INDEX, ('search',), style='brief') == (
    head + 'search[<your query>]'
  )
  history = (turns.Turn('seen', 'search[lip balms]'),)
  assert _build(
    RESULTS, RESULTS_CLICKABLES, style='brief', history=history, step=1
  ) == (
    f'{head}> search[lip balms]\n'
    'page 2 [back to search] [< prev] [next >]\n'
    '[b01] Alder Lip Balm with a title of more than ten $3.99\n'
    '[b02] Brisk Balm $2.0 to $4.5'
  )
  assert _build(ITEM, ITEM_CLICKABLES, style='brief') == (
    f'{head}[back to search] [< prev]\n'
    'size: [small] [1 | 2 oz]\n'
    'color: [red]\n'
    'Alder Lip Balm $3.99\n'
    '[description] [features] [reviews] [buy now]'
  )
  assert _build(SUB_PAGE, SUB_PAGE_CLICKABLES, style='brief') == (
    f'{head}[back to search] [< prev]\nSoft and sweet.'
  )


def test_layout_without_a_limit_shows_full_titles():
  text = prompts.lay_out(pages.split(RESULTS, TASK), RESULTS_CLICKABLES)
  assert 'ten words, Gift Box $3.99' in text


@pytest.mark.parametrize('style', narrator.STYLES)
def test_a_prompt_that_is_too_long_omits_history(style: str):
  def build(letters: int) -> str:
    return _build(
      INDEX,
      ('search',),
      style=style,
      history=(turns.Turn('x' * letters, 'y' * letters),),
      step=1,
    )

  short = _build(INDEX, ('search',), style=style, step=1)
  copies = 2 if style == 'paper' else 1
  fixed = len(build(0))
  max_letters = (13_000 - fixed) // copies
  assert len(build(max_letters)) in (12_999, 13_000)
  assert build(max_letters + 1) == short


@pytest.mark.parametrize(
  ('response', 'action', 'valid'),
  [
    (
      '<think>a</think><action>Click[B01]</action>',
      'click[b01]',
      True,
    ),
    # The last 20 characters; ALFWorld's limit is 30.
    ('I would like to search[red shoes]', 'to search[red shoes]', False),
    ('<action>click[b01]</action>', 'ction>click[b01]</action>'[-20:], False),
  ],
)
def test_parsing_responses(response: str, action: str, valid: bool):
  assert _parse(response) == (action, valid)


def test_think_tags_can_be_optional():
  response = '<action>click[b01]</action>'
  assert _parse(response, require_think=False) == ('click[b01]', True)


def test_all_recorded_pages_can_be_parsed():
  traces = reference_data.WEBSHOP / 'golden_traces.jsonl.gz'
  with gzip.open(traces, 'rt', encoding='utf-8') as file:
    episodes = [json.loads(line) for line in file]
  page_types = {'index': 0, 'results': 0, 'item': 0, 'sub_page': 0}
  for episode in episodes:
    task = episode['goal']['instruction_text']
    for page in [episode['first'], *episode['steps']]:
      if page.get('done'):
        continue
      parts = pages.split(page['obs'], task)
      assert parts[0] in ('Search', 'Back to Search')
      clickables = page['clickables']
      view = pages.read(parts, clickables)
      page_types[view.page_type] += 1
      # The brief style puts every clickable text in brackets.
      if view.page_type != 'index':
        laid_out = prompts.lay_out(parts, clickables)
        assert all(f'[{c}]' in laid_out for c in clickables), laid_out
  expected = (22, 25, 39, 1)
  if reference_data.IS_FULL:
    expected = (186, 232, 489, 92)
  assert tuple(page_types.values()) == expected
