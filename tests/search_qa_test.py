"""Tests of search QA: answer matching, BM25, damaged files, the oracle."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import envs
from envs import base
from envs.search_qa import corpus, madeup, prompts
from envs.search_qa import env as search_env
from gigpo_jax import anchors

ROOT = pathlib.Path(envs.__file__).parents[1]
TASK = base.Task('train', 3)
PASSAGES = [
  {'id': '0', 'title': 'Cats', 'text': 'The cat sat on a mat.'},
  {'id': '1', 'contents': '"Dogs"\nThe dog sat on another mat, and on a cat.'},
  {'id': '2', 'title': 'Ünder', 'text': 'Nothing of the sort is here.'},
]
QUESTIONS = [
  {'question': 'What sat?', 'golden_answers': ['The Cat', 'dog']},
  {
    'question': 'Where?',
    'golden_answers': ['mat'],
    'data_source': 'nq',
    'metadata': {'titles': ['Cats']},
  },
]


def _write(path: pathlib.Path, records: list) -> None:
  lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
  path.write_text('\n'.join(lines) + '\n', encoding='utf-8')


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
  _write(tmp_path / 'corpus.jsonl', PASSAGES)
  _write(tmp_path / 'train.jsonl', QUESTIONS)
  _write(tmp_path / 'test.jsonl', QUESTIONS[:1])
  return tmp_path


def _respond(name: str, words: str) -> str:
  return f'<think>so</think><{name}>{words}</{name}>'


@pytest.mark.parametrize(
  ('answer', 'correct'),
  [
    ('cat', True),
    (' THE cat. ', True),
    ('a  dog', True),
    ('cats', False),
    ('the cat and the dog', False),
    ('', False),
  ],
)
def test_answers_are_compared_as_in_squad(answer, correct):
  assert search_env.is_correct(answer, ('The Cat', 'dog')) == correct
  assert search_env.normalize('An  U.S. theme, the "end"') == 'us theme end'


@pytest.mark.parametrize(
  ('response', 'name', 'words', 'valid'),
  [
    (_respond('search', ' A Cat '), 'search', 'A Cat', True),
    (_respond('answer', 'x\ny'), 'answer', 'x\ny', True),
    ('<think>or <answer>?</think><search>a</search> end', 'search', 'a', True),
    ('<think>so</think><SEARCH>a</SEARCH>', 'search', 'a', True),
    ('<search>a</search><think>so</think>', 'search', 'a', True),
    ('<search>a</search>', 'search', 'a', False),
    (_respond('search', ' '), '', '', False),
    (_respond('answer', 'b') + '<search>a</search>', 'search', 'a', False),
    (_respond('search', 'a') + '<search>b</search>', 'search', 'a', False),
    ('<think>so</think><search>a</answer>', '', '', False),
    ('<think>so</think><answer>a', '', '', False),
    ('', '', '', False),
  ],
)
def test_parsing_responses(response, name, words, valid):
  assert prompts.parse(response) == (name, words, valid)


def _parse_by_expressions(response):
  """Reads actions with expressions that take quadratic time."""
  flags = re.ASCII | re.IGNORECASE | re.DOTALL
  thought = re.search('<think>.*?</think>', response, flags)
  rest = re.sub('<think>.*?</think>', '', response, count=1, flags=flags)
  actions = re.findall(r'<(search|answer)>(.*?)</\1>', rest, flags)
  actions = [(name.lower(), words.strip()) for name, words in actions]
  actions = sorted((a for a in actions if a[1]), key=lambda a: a[0] != 'search')
  opening = re.findall('<(?:search|answer)>', rest, flags)
  if not actions:
    return '', '', False
  return *actions[0], len(opening) == 1 and bool(thought)


def test_any_order_of_tags():
  rng = np.random.default_rng(0)
  parts = [
    f'<{end}{tag}>'
    for tag in ('search', 'ANSWER', 'think')
    for end in ('', '/')
  ]
  parts += ['x', ' ', 'İ', '<ſearch>']
  valid = 0
  for _ in range(5000):
    response = ''.join(rng.choice(parts, rng.integers(1, 12)))
    expected = _parse_by_expressions(response)
    assert prompts.parse(response) == expected, response
    valid += expected[2]
  assert valid > 20


def test_opening_tags_without_an_end_take_linear_time():
  for tag in ('<search>', '<answer>', '<think>'):
    assert prompts.parse(200_000 * tag) == ('', '', False)


def test_thoughts_can_be_optional():
  parsed = prompts.parse('<search>a</search>', require_think=False)
  assert parsed == ('search', 'a', True)


def test_scores_equal_bm25_worked_out_by_hand(folder):
  passages = corpus.Corpus(folder / 'corpus.jsonl')
  assert len(passages) == 3
  assert passages[1].title == 'Dogs'
  assert passages[2] == corpus.Passage('Ünder', 'Nothing of the sort is here.')
  # Words after stemming: 'cat the cat sat on a mat', 7; 'dog the dog sat on
  # anoth mat and on a cat', 11; 'under noth of the sort is here', 7. The mean
  # length is 25 / 3; k1 = 1.2, b = 0.75. `cat` is in two of three passages, so
  # its idf is ln(1 + 1.5 / 2.5).
  idf = math.log(1 + 1.5 / 2.5)

  def score(count: int, length: int) -> float:
    norm = 1.2 * (0.25 + 0.75 * length / (25 / 3))
    return idf * count * 2.2 / (count + norm)

  scores = _scores(passages, 'Cats!')
  assert scores == pytest.approx([score(2, 7), score(1, 11)], rel=1e-5)
  titles = [passage.title for passage in passages.search('cats', 3)]
  assert titles == ['Cats', 'Dogs']
  assert [p.title for p in passages.search('cats', 1)] == ['Cats']


def _scores(passages: corpus.Corpus, query: str) -> list[float]:
  scores = []
  searcher = passages._searcher

  class Spy:
    doc = searcher.doc

    def search(self, *arguments):
      result = searcher.search(*arguments)
      scores.extend(score for score, _ in result.hits)
      return result

  passages._searcher = Spy()
  passages.search(query, 3)
  passages._searcher = searcher
  return scores


@pytest.mark.parametrize('query', ['zzz', '', '!?', 'a:b AND "', 'x' * 5_000])
def test_any_query_returns_a_list(folder, query):
  passages = corpus.Corpus(folder / 'corpus.jsonl')
  assert isinstance(passages.search(query, 3), list)


def test_ties_are_in_the_order_of_the_file(tmp_path):
  same = [{'title': f'T{n}', 'text': 'a pear'} for n in range(12)]
  _write(tmp_path / 'corpus.jsonl', same)
  passages = corpus.Corpus(tmp_path / 'corpus.jsonl')
  assert [p.title for p in passages.search('pear', 3)] == ['T0', 'T1', 'T2']


def test_the_index_is_built_once_and_rebuilt_if_the_file_changes(
  folder, monkeypatch
):
  path = folder / 'corpus.jsonl'
  first = corpus.Corpus(path)
  assert isinstance(first._offsets, np.memmap)
  with monkeypatch.context() as patch:
    patch.setattr(corpus, '_write_index', lambda *_: pytest.fail('made again'))
    second = corpus.Corpus(path)
    assert second.search('cat', 3) == first.search('cat', 3)
  _write(path, PASSAGES[1:])
  assert [p.title for p in corpus.Corpus(path).search('cat', 3)] == ['Dogs']


def test_three_processes_build_one_index(folder, tmp_path):
  code = (
    'import pathlib; from envs.search_qa import corpus; '
    f'c = corpus.Corpus(pathlib.Path({str(folder / "corpus.jsonl")!r})); '
    'print([p.title for p in c.search("cat", 2)])'
  )
  home = tmp_path / 'cache'
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', code],
      env=os.environ | {'GIGPO_JAX_CACHE': str(home)},
      cwd=ROOT,
      stdout=subprocess.PIPE,
      text=True,
    )
    for _ in range(3)
  ]
  outputs = {process.communicate(timeout=60)[0] for process in processes}
  assert outputs == {"['Cats', 'Dogs']\n"}
  assert len([p for p in home.iterdir() if p.is_dir()]) == 1


def test_searching_and_answering(folder):
  env = search_env.Env(data_dir=str(folder), top_k=2)
  first = env.reset(base.Task('train', 0))
  assert first.anchor == first.text == first.task == 'What sat?'
  result = env.step(_respond('search', 'dog'))
  assert (result.reward, result.valid, result.done) == (0, True, False)
  shown = 'Passage 1 (title: Dogs) The dog sat on another mat, and on a cat.'
  assert result.observation.text == result.observation.anchor == shown
  expected = f'<search>dog</search>\n<information>\n{shown}\n</information>'
  assert expected in result.observation.prompt
  assert '<information>' not in first.prompt
  last = env.step(_respond('answer', 'the dog'))
  assert last.reward == 1 and last.success and last.done
  assert last.final_anchor == 'Answer: dog'


def test_a_wrong_answer_and_the_step_limit_give_no_reward(folder):
  env = search_env.Env(data_dir=str(folder), max_steps=2)
  env.reset(base.Task('train', 0))
  wrong = env.step(_respond('answer', 'cats'))
  assert wrong.done and not wrong.success and wrong.reward == 0
  env.reset(base.Task('train', 0))
  results = [env.step(_respond('search', 'mat')) for _ in range(2)]
  assert [r.done for r in results] == [False, True]
  assert results[1].final_anchor.startswith('Passage 1')


def test_an_invalid_response_uses_up_a_step(folder):
  env = search_env.Env(data_dir=str(folder))
  first = env.reset(base.Task('train', 0))
  result = env.step('<think>so</think><search>cat')
  assert not result.valid and result.reward == 0 and not result.done
  assert result.observation.anchor == first.anchor
  assert 'taken 1 of 4 step(s)' in result.observation.prompt


def test_history_holds_the_last_searches(folder):
  env = search_env.Env(data_dir=str(folder), history_length=2, max_steps=9)
  env.reset(base.Task('train', 0))
  for words in ('one', 'two', 'three'):
    observation = env.step(_respond('search', words)).observation
  assert '<search>one</search>' not in observation.prompt
  assert observation.prompt.count('</information>') == 2
  assert observation.short_prompt.count('</information>') == 1
  assert observation.text == search_env.NOTHING


def test_long_passages_are_cut(folder):
  env = search_env.Env(data_dir=str(folder), max_passage_chars=5, top_k=1)
  env.reset(base.Task('train', 0))
  shown = env.step(_respond('search', 'dog')).observation.text
  assert shown == 'Passage 1 (title: Dogs) The d'


def test_similar_results_share_an_anchor_id():
  env = search_env.Env()
  states = []
  for query in ('painter born in', 'a painter born in', 'Letters'):
    env.reset(TASK)
    states.append(env.step(_respond('search', query)).observation.anchor)
  (ids,) = anchors.assign_ids([(0, states)], anchor='similarity', threshold=0.9)
  assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize('style', ['paper', 'brief'])
def test_the_oracle_answers_every_question(style):
  env = search_env.Env(prompt_style=style, top_k=1)
  for split in ('train', 'test'):
    questions = env.questions(split)
    for index in range(60):
      task = base.Task(split, index)
      steps = list(env.demonstrate(task, noise=0.0, seed=0))
      hops = int(questions.task_type(index)[0])
      assert len(steps) == hops + 1 <= 4
      replay = env.reset(task)
      for shown, response in steps:
        assert shown == replay
        result = env.step(response)
        replay = result.observation
      assert result.success


def test_the_oracle_repeats_failed_searches():
  env = search_env.Env(max_steps=20)
  lengths = [
    len(list(env.demonstrate(base.Task('train', n), noise=0.5, seed=1)))
    - len(env.questions('train')[n].titles)
    for n in range(40)
  ]
  assert min(lengths) == 1 and max(lengths) > 2


def test_demonstrations_need_the_titles_of_passages(folder):
  env = search_env.Env(data_dir=str(folder))
  with pytest.raises(ValueError, match='has no expert; questions must name'):
    list(env.demonstrate(base.Task('train', 0), noise=0.0, seed=0))
  assert len(list(env.demonstrate(base.Task('train', 1), noise=0, seed=0))) == 2


def test_generated_files_depend_on_the_arguments_only(tmp_path):
  for name, options in (('a', {}), ('b', {}), ('c', {'seed': 1})):
    (tmp_path / name).mkdir()
    madeup.write(tmp_path / name, num_people=20, **options)
  files = {
    name: [p.read_bytes() for p in sorted((tmp_path / name).iterdir())]
    for name in 'abc'
  }
  assert files['a'] == files['b'] != files['c']
  train, test = (
    {q.text for q in corpus.questions(tmp_path / 'a', split)}
    for split in ('train', 'test')
  )
  assert train.isdisjoint(test) and (len(train), len(test)) == (80, 20)
  # No person is asked about in both splits, also not as an author.
  files = [tmp_path / 'a' / f'{split}.jsonl' for split in ('train', 'test')]
  people = [set(), set()]
  authors = {}
  for text in (tmp_path / 'a' / 'corpus.jsonl').read_text().splitlines():
    if match := re.match(
      '(The .*) is a book written by (.*)[.]', json.loads(text)['text']
    ):
      authors[match[1]] = match[2]
  for file, asked in zip(files, people, strict=True):
    for line in file.read_text().splitlines():
      title = json.loads(line)['metadata']['titles'][0]
      asked.add(authors.get(title, title))
  assert people[0].isdisjoint(people[1])
  assert (len(people[0]), len(people[1])) == (16, 4)


def test_episodes_do_not_depend_on_earlier_episodes():
  used, fresh = envs.make('search_qa'), envs.make('search_qa')
  first = used.reset(TASK)
  used.step(_respond('search', 'painter'))
  assert used.reset(TASK) == first == fresh.reset(TASK)
  assert used.step(_respond('search', 'town')) == fresh.step(
    _respond('search', 'town')
  )


def test_counts_and_types_of_tasks(folder):
  split = envs.tasks('search_qa', 'train', data_dir=str(folder))
  assert len(split) == 2
  assert [split.task_type(n) for n in range(2)] == ['all', 'nq']


@pytest.mark.parametrize(
  ('name', 'records', 'message'),
  [
    ('corpus', [PASSAGES[0], 'x'], 'corpus.jsonl, line 2: not a JSON object'),
    ('corpus', [PASSAGES[0], ''], 'corpus.jsonl, line 2: not a JSON object'),
    ('corpus', [{'title': 'x'}], 'line 1: must have title and text'),
    ('train', [{'question': 'x'}], 'line 1: must have question and golden'),
    ('train', [{'question': 'x', 'golden_answers': 'y'}], 'line 1: must have'),
    (
      'train',
      [{'question': 'x', 'golden_answers': ['y'], 'data_source': 'a\nb'}],
      r"line 1: data_source='a\\nb'; must be 1 to 128 printable characters",
    ),
    ('train', [[]], 'train.jsonl, line 1: not a JSON object'),
    ('train', [''], 'train.jsonl is empty'),
  ],
)
def test_damaged_files_are_errors_in_one_line(folder, name, records, message):
  _write(folder / f'{name}.jsonl', records)
  with pytest.raises(ValueError, match=message) as error:
    envs.tasks('search_qa', 'train', data_dir=str(folder))
  assert len(str(error.value).splitlines()) == 1
  assert str(folder) in str(error.value)


def test_damaged_emojis_and_titles_are_read(folder):
  half = json.loads(r'"\ud83d"')
  _write(folder / 'corpus.jsonl', [{'title': half, 'text': f'fox {half}'}])
  _write(
    folder / 'train.jsonl',
    [
      {
        'question': half,
        'golden_answers': [half, 5],
        'data_source': half,
        'metadata': {'titles': 5},
      }
    ],
  )
  assert corpus.passages(folder).search('fox', 1) == [
    corpus.Passage('?', 'fox ?')
  ]
  assert corpus.questions(folder, 'train') == (
    corpus.Question('?', ('?', '5'), '?', ()),
  )


@pytest.mark.parametrize('name', ['corpus', 'train'])
def test_lines_that_are_nested_too_deep_are_errors(folder, name):
  (folder / f'{name}.jsonl').write_text('[' * 100_000)
  with pytest.raises(ValueError, match=f'{name}.jsonl, line 1: not a JSON'):
    envs.tasks('search_qa', 'train', data_dir=str(folder))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'data_dir': '/nowhere'}, 'env.data_dir=/nowhere: has no corpus.jsonl'),
    ({'top_k': 0}, 'env.top_k=0: must be at least 1'),
    ({'max_passage_chars': 0}, 'env.max_passage_chars=0: must be'),
    ({'generator': {'num_people': 3}}, 'env.generator.num_people=3: must be'),
    ({'prompt_style': 'long'}, 'env.prompt_style=long: must be one of'),
  ],
)
def test_invalid_arguments_are_errors(changes, message):
  with pytest.raises(ValueError, match=message):
    envs.tasks('search_qa', 'train', **changes)


def test_unknown_splits_are_errors_that_list_the_known_ones(folder):
  with pytest.raises(ValueError, match='split=dev: .* must be one of test, tr'):
    envs.tasks('search_qa', 'dev', data_dir=str(folder))


def test_a_missing_tantivy_is_reported(monkeypatch):
  monkeypatch.setitem(sys.modules, 'tantivy', None)
  corpus._load_corpus.cache_clear()
  with pytest.raises(ValueError, match='tantivy is not installed; run pip'):
    envs.make('search_qa')
