"""The search QA environment: a question, searches, and an answer.

It is the third task of GiGPO's release, taken from Search-R1. The action
`<search>words</search>` shows the best passages of a corpus. The action
`<answer>words</answer>` ends the episode. The reward is 1 if the answer equals
a correct one after SQuAD's normalisation, else 0.
"""

import functools
import json
import pathlib
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from envs import base, cache, narrator, turns
from envs.search_qa import corpus, madeup, prompts

SUCCESS_REWARD = 1.0
DATA = base.Data(
  'SEARCH_QA_DATA',
  'no corpus; prepare its files (envs/search_qa/corpus.py)',
)

_PUNCTUATION = str.maketrans('', '', string.punctuation)
_ARTICLES = re.compile(r'\b(a|an|the)\b')

NOTHING = 'No passage found.'


def normalize(text: str) -> str:
  """Normalises an answer as SQuAD's evaluation does.

  The result is in lower case, without punctuation, articles and extra spaces.
  """
  words = text.lower().translate(_PUNCTUATION)
  return ' '.join(_ARTICLES.sub(' ', words).split())


def is_correct(answer: str, answers: Sequence[str]) -> bool:
  """Returns whether an answer equals one of the correct answers."""
  return normalize(answer) in map(normalize, answers)


@functools.lru_cache(maxsize=4)
def _generated_folder(options: str) -> pathlib.Path:
  # The generated files depend on the source of the generator and its options.
  source = pathlib.Path(madeup.__file__).read_bytes()
  return cache.ensure(
    cache.place('questions', source, options),
    functools.partial(madeup.write, **json.loads(options)),
  )


def _data_folder(
  data_dir: str | None = None, generator: dict | None = None
) -> pathlib.Path:
  """Returns the folder of the data files; generates them without data_dir."""
  if data_dir:
    return pathlib.Path(data_dir).expanduser()
  try:
    madeup.check_options(**(generator or {}))
  except TypeError as error:
    raise ValueError(f'env.generator={generator}: {error}') from error
  return _generated_folder(json.dumps(generator or {}, sort_keys=True))


class Questions:
  """The questions of a split, by task index."""

  def __init__(self, split: str, folder: pathlib.Path):
    self._questions = corpus.questions(folder, split)

  def __len__(self) -> int:
    return len(self._questions)

  def __getitem__(self, index: int) -> corpus.Question:
    return self._questions[index]

  def task_type(self, index: int) -> str:
    """Returns the task type: the data source of the question."""
    return self[index].task_type

  def answer(self, index: int) -> str:
    """Returns the first correct answer."""
    return self[index].answers[0]


def answer_start(kwargs: Mapping[str, Any]) -> str:
  """Returns the start of a response up to the answer."""
  return prompts.answer_start(require_think=kwargs.get('require_think', True))


def tasks(split: str, **kwargs) -> Questions:
  """Returns the questions of a split; accepts the kwargs of `Env`."""
  return Env(**kwargs).questions(split)


class Env:
  """The search QA environment.

  Args:
    data_dir: folder of the data files; see `corpus.py`. None or '' generates
      them.
    generator: options of `madeup.write`, for generated data.
    top_k: number of passages that a search shows.
    max_passage_chars: length to which a shown passage is cut, characters.
    max_steps: step limit of an episode.
    history_length: K, how many past searches the prompt shows.
    prompt_style: one of `narrator.STYLES`.
    require_think: whether a response must contain a `<think>` part.

  Raises:
    ValueError: in one line, if an argument or the data is not valid.
  """

  def __init__(
    self,
    *,
    data_dir: str | None = None,
    generator: dict | None = None,
    top_k: int = 3,
    max_passage_chars: int = 1_000,
    max_steps: int = 4,
    history_length: int = 4,
    prompt_style: str = 'paper',
    require_think: bool = True,
  ):
    for name, value in (
      ('top_k', top_k),
      ('max_passage_chars', max_passage_chars),
      # The history holds the passages.
      ('history_length', history_length),
    ):
      if value < 1:
        raise ValueError(f'env.{name}={value}: must be at least 1')
    self._transcript = narrator.Transcript(
      functools.partial(prompts.build, max_steps=max_steps),
      history_length=history_length,
      prompt_style=prompt_style,
      require_think=require_think,
      short_history_length=1,
    )
    self._folder = _data_folder(data_dir, generator)
    # Loaded here because it can take minutes for a large corpus: a worker's
    # start may take longer than a step.
    self._corpus = corpus.passages(self._folder)
    self._top_k, self._max_passage_chars = top_k, max_passage_chars
    self._max_steps, self._style = max_steps, prompt_style
    self._require_think = require_think
    self._question: corpus.Question
    self._text = ''

  def questions(self, split: str) -> Questions:
    """Returns the questions of a split."""
    return Questions(split, self._folder)

  def prepare(self, task: base.Task) -> None:
    """Loads the questions of the task's split."""
    self.questions(task.split)

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode with the task's question."""
    self._question = self.questions(task.split)[task.index]
    self._text = self._question.text
    self._transcript.reset(self._text)
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    """Searches or answers; a response without an action uses up a step."""
    name, words, valid = prompts.parse(
      response, require_think=self._require_think
    )
    success = name == 'answer' and is_correct(words, self._question.answers)
    turn = None
    if name == 'search':
      self._text = self._search(words)
      turn = turns.Turn(self._text, words)
    self._transcript.record_turn(turn)
    done = name == 'answer' or self._transcript.step >= self._max_steps
    anchor = f'Answer: {normalize(words)}' if name == 'answer' else self._text
    return base.StepResult(
      observation=None if done else self._observe(),
      final_anchor=anchor if done else None,
      reward=SUCCESS_REWARD if success else 0.0,
      valid=valid,
      action=f'<{name}>{words}</{name}>' if name else '',
      success=success,
      done=done,
      metrics={'search_rate': float(name == 'search')},
    )

  def close(self) -> None:
    """Does nothing; corpus and questions are shared by the process."""

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Plays an oracle that knows which passages to look up; yields each step.

    Args:
      task: the question to answer.
      noise: probability that a search uses a single word, of the query or of
        the question. A passage that was not found is searched for again.
      seed: seed of the noise.

    Yields:
      (observation, response) of a step.

    Raises:
      ValueError: in one line, if the data does not name the passages.
    """
    rng = np.random.default_rng([seed, task.index])
    observation: base.Observation | None = self.reset(task)
    if not self._question.titles:
      raise ValueError(
        f'env.data_dir={self._folder}: has no expert; questions must name the '
        'passages that answer them, as "metadata": {"titles": [..]}'
      )
    missing = list(self._question.titles)
    while observation is not None:
      if missing:
        query = missing[0]
        thought = f'I look for {query}.'
        if rng.random() < noise:
          words = f'{query} {self._question.text}'.strip('?').split()
          query = words[rng.integers(len(words))]
        response = self._transcript.format_response(
          thought, query, tag='search'
        )
        passages = self._corpus.search(query, self._top_k)
        if missing[0] in [passage.title for passage in passages]:
          missing.pop(0)
      else:
        response = self._transcript.format_response(
          'I know the answer.', self._question.answers[0], tag='answer'
        )
      yield observation, response
      observation = self.step(response).observation

  def _search(self, query: str) -> str:
    """Returns the text that shows the results of a search."""
    passages = self._corpus.search(query, self._top_k)
    lines = [
      f'{passage.title}: {passage.text}'[: self._max_passage_chars]
      if self._style == 'brief'
      else f'Passage {n} (title: {passage.title}) '
      f'{passage.text[: self._max_passage_chars]}'
      for n, passage in enumerate(passages, 1)
    ]
    return '\n'.join(lines) or NOTHING

  def _observe(self) -> base.Observation:
    return self._transcript.observe(
      self._text, anchor=self._text, actions=prompts.ACTIONS
    )
