"""Tests of generated shops: official format and statistics, difficulty."""

import json
import math
import statistics
import subprocess
import sys

import pytest
import reference_data

from envs.webshop import catalogue, listings


def _official() -> tuple[list[dict], dict[str, dict]]:
  data = reference_data.WEBSHOP
  return (
    json.loads((data / 'items_shuffle_1000.json').read_text('utf-8')),
    json.loads((data / 'items_ins_v2_1000.json').read_text('utf-8')),
  )


def _options(item: dict) -> dict[str, list[str]]:
  options = item['customization_options'] or {}
  return {
    name: [value['value'] for value in values]
    for name, values in options.items()
    if values
  }


def test_a_shop_depends_on_its_arguments_only():
  shop = catalogue.generate(num_products=50, seed=3)
  assert shop == catalogue.generate(num_products=50, seed=3)
  assert shop != catalogue.generate(num_products=50, seed=4)


def test_every_product_is_consistent():
  items, instructions = catalogue.generate(num_products=500)
  assert len({item['asin'] for item in items}) == 500
  assert list(instructions) == [item['asin'] for item in items]
  for item in items:
    assert len(item['asin']) == 10
    assert item['category'] in catalogue.CATEGORIES
    assert len(item['product_category'].split(' › ')) == 3
    entry = instructions[item['asin']]
    if 'instruction' in entry:
      assert entry['instruction'].startswith('Find me ')
      assert item['query'] in entry['instruction']
      assert set(entry['instruction_attributes']) <= set(entry['attributes'])
      for attribute in entry['instruction_attributes']:
        assert attribute in entry['instruction']
    combinations = math.prod(map(len, _options(item).values()))
    assert 1 <= combinations <= 60


@reference_data.needs_full_data
def test_records_have_the_fields_of_the_official_ones():
  official, official_instructions = _official()
  items, instructions = catalogue.generate(num_products=300)
  # All fields that the loader reads must be present.
  assert set(items[0]) == set(official[0])

  def shapes(entries: dict[str, dict]) -> set[tuple[str, ...]]:
    return {tuple(sorted(entry)) for entry in entries.values()}

  assert shapes(instructions) == shapes(official_instructions)

  def values(items: list[dict]) -> set[tuple[str, ...]]:
    return {
      tuple(sorted(value))
      for item in items
      for values in (item['customization_options'] or {}).values()
      for value in values or ()
    }

  assert values(items) == values(official)
  assert {type(item['customization_options']) for item in items} == {str, dict}


def _statistics(items: list[dict], instructions: dict) -> dict[str, float]:
  goals = [i for i in items if 'instruction' in instructions[i['asin']]]
  options = [_options(item) for item in items]
  attribute_counts = [
    len(instructions[i['asin']]['instruction_attributes']) for i in goals
  ]
  prices = [
    float(item['pricing'].split('$')[1].strip(' -').replace(',', ''))
    for item in items
    if item['pricing']
  ]
  return {
    'fraction with instruction': len(goals) / len(items),
    'fraction without options': sum(not o for o in options) / len(items),
    'fraction with two options': sum(len(o) == 2 for o in options) / len(items),
    'values of an option': statistics.mean(
      len(values) for o in options for values in o.values()
    ),
    'attributes of an instruction': statistics.mean(attribute_counts),
    'fraction without price': sum(not i['pricing'] for i in items) / len(items),
    'fraction with price range': sum(
      item['pricing'].count('$') > 1 for item in items
    )
    / len(items),
    'logarithm of a price': statistics.median(map(math.log, prices)),
    'words of a title': statistics.mean(len(i['name'].split()) for i in items),
    'fraction of fashion': sum(i['category'] == 'fashion' for i in items)
    / len(items),
    'titled attributes': statistics.mean(
      attribute in item['name'].lower()
      for item in goals
      for attribute in instructions[item['asin']]['instruction_attributes']
    ),
  }


# Statistics of the 1,000 official products, for tests without the files.
OFFICIAL = {
  'fraction with instruction': 0.415,
  'fraction without options': 0.577,
  'fraction with two options': 0.165,
  'values of an option': 5.70,
  'attributes of an instruction': 3.18,
  'fraction without price': 0.089,
  'fraction with price range': 0.093,
  'logarithm of a price': 3.22,
  'words of a title': 17.98,
  'fraction of fashion': 0.2,
  'titled attributes': 0.217,
}


@reference_data.needs_full_data
def test_the_recorded_official_statistics_are_correct():
  assert _statistics(*_official()) == pytest.approx(OFFICIAL, abs=0.005)


def test_the_default_shop_resembles_the_official_one():
  # Within 12.5 %, or within 0.03 for fractions.
  generated = _statistics(*catalogue.generate(num_products=4000, seed=1))
  assert generated == pytest.approx(OFFICIAL, rel=0.125, abs=0.03)


def test_goals_are_spread_more_evenly_than_official_ones():
  # Among the official goals, one product of 415 has 558 of 6,910.
  items, instructions = catalogue.generate(num_products=1000)
  counts = [
    math.prod(map(len, _options(item).values()))
    for item in items
    if 'instruction' in instructions[item['asin']]
  ]
  assert max(counts) <= 60
  assert sum(counts) > 2000


def test_an_easy_shop():
  items, instructions = catalogue.generate(
    num_products=100,
    categories=('grocery',),
    vocabulary=0.25,
    options=(1, 2),
    values=(2, 3),
    attributes=(2, 2),
    title_words=(3, 4),
    title_share=1.0,
    instruction_share=1.0,
    asin_characters=4,
  )
  shelves = {item['query'] for item in items}
  # A vocabulary of 0.25 uses 4 of 16 shelves.
  assert shelves == {
    'chips & crisps',
    'cookies',
    'granola bars',
    'popcorn',
  }
  for item in items:
    entry = instructions[item['asin']]
    assert item['category'] == 'grocery'
    assert len(item['asin']) == 4 and item['asin'].isalpha()
    assert entry['instruction_attributes'] == entry['attributes']
    assert len(entry['attributes']) == 2
    assert all(attribute in item['name'] for attribute in entry['attributes'])
    options = _options(item)
    assert 1 <= len(options) <= 2
    assert all(1 <= len(values) <= 3 for values in options.values())


def test_near_duplicates_differ_in_one_property():
  items, instructions = catalogue.generate(
    num_products=60,
    family=(59, 59),
    options=(2, 2),
    values=(4, 4),
    title_share=1.0,
    title_words=(1, 1),
  )
  # Most variants share their attributes, or their options, with the first
  # product of the family.
  attributes = [tuple(instructions[i['asin']]['attributes']) for i in items]
  options = [
    tuple((name, tuple(values)) for name, values in _options(item).items())
    for item in items
  ]
  usual = (statistics.mode(attributes), statistics.mode(options))
  changes = set()
  for product in zip(attributes, options, strict=True):
    changed = [a != b for a, b in zip(product, usual, strict=True)]
    assert sum(changed) <= 1
    changes.add(tuple(changed))
    if changed[0]:
      assert len(set(product[0]) ^ set(usual[0])) == 2
    if changed[1]:
      assert sum(len(v) for _, v in product[1]) == 7
  assert len(changes) == 3
  assert len({item['query'] for item in items}) == 1


@pytest.mark.parametrize(
  ('option', 'value', 'accepted'),
  [
    ('categories', ('toys',), 'must be some of beauty, electronics'),
    ('vocabulary', 0, 'must be from 0.01 to 1.0'),
    ('title_share', 1.1, 'must be from 0.0 to 1.0'),
    ('values', (5, 2), 'must be (low, high) with 1 <= low <= high <= 45'),
    ('options', (0, 4), 'must be (low, high) with 0 <= low <= high <= 3'),
    ('num_products', 0, 'must be from 1 to'),
    ('asin_characters', 2, 'must be from 3 to 10'),
    ('colour', 'red', 'unknown option; known: num_products, seed'),
  ],
)
def test_invalid_options_are_errors_in_one_line(option, value, accepted):
  with pytest.raises(ValueError) as error:
    catalogue.generate(**{option: value})
  message = str(error.value)
  assert message.startswith(f'env.generator.{option}')
  assert accepted in message
  assert len(message.splitlines()) == 1


def test_ids_too_short_for_the_number_of_products_are_an_error():
  with pytest.raises(
    ValueError, match='from 1 to 1000 with env.generator.asin'
  ):
    catalogue.generate(num_products=1001, asin_characters=3)


def test_an_instruction_worked_out_by_hand():
  draft = listings.Draft(
    category='beauty',
    aisle='Makeup',
    shelf='lipsticks',
    noun='Lipstick',
    brand='Alder',
    attributes=('oil free', 'green tea', 'vitamin c', 'dry skin'),
    titled=frozenset(('green tea', 'dry skin')),
    fillers=('Gift Box', 'New Design', '2 Pack'),
    title_words=9,
    options={},
    price=9.0,
  )
  assert listings.instruction(draft, ()) == {
    'attributes': ['oil free', 'green tea', 'vitamin c', 'dry skin']
  }
  entry = listings.instruction(draft, ('vitamin c', 'green tea', 'oil free'))
  assert entry['instruction'] == (
    'Find me oil free lipsticks with green tea, vitamin c'
  )
  # The title has seven words; one filler makes it nine.
  assert listings._title(draft) == (
    'Alder Lipstick with green tea for dry skin, Gift Box'
  )


def test_the_program_writes_a_shop_and_does_not_overwrite_it(tmp_path):
  command = [sys.executable, '-m', 'envs.webshop.catalogue']
  command += ['--out', str(tmp_path), '--num_products', '20']
  result = subprocess.run(command, capture_output=True, text=True, check=True)
  assert result.stdout == f'wrote 20 products to {tmp_path}\n'
  items = json.loads((tmp_path / catalogue.ITEMS_FILE).read_text())
  assert items == catalogue.generate(num_products=20)[0]
  second = subprocess.run(command, capture_output=True, text=True, check=False)
  assert second.returncode == 2
  assert 'items_shuffle.json exists already' in second.stderr
