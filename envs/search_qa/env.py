"""The search QA environment: a question, searches, and an answer.

It is the third task of GiGPO's release, taken from Search-R1. The action
`<search>words</search>` shows the best passages of a corpus. The action
`<answer>words</answer>` ends the episode. The reward is 1 if the answer equals
a correct one after SQuAD's normalisation, else 0.
"""

import collections
import functools
import json
import pathlib
import re
import string
from collections.abc import Iterator, Sequence

import numpy as np

from envs import base, cache, narrator, turns
from envs.search_qa import corpus, madeup

SUCCESS_REWARD = 1.0

_TAGGED = re.compile(r'<(search|answer)>(.*?)</\1>', re.IGNORECASE | re.DOTALL)
_OPENING = re.compile(r'<(?:search|answer)>', re.IGNORECASE)
_THOUGHT = re.compile('<think>.*?</think>', re.IGNORECASE | re.DOTALL)
_PUNCTUATION = str.maketrans('', '', string.punctuation)
_ARTICLES = re.compile(r'\b(a|an|the)\b')

ACTIONS = ('<search>your query</search>', '<answer>your answer</answer>')
_THINK = (
  'First reason about what is known and what is missing. This reasoning must '
  'be enclosed within <think> </think> tags. '
)
_ACT = (
  'Then do one of two things, not both:\n'
  '- if something is missing, search for it: <search> your query </search>\n'
  '- if you know the answer, give it in as few words as possible: '
  '<answer> your answer </answer>'
)
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


def project(
  response: str, *, require_think: bool = True
) -> tuple[str, str, bool]:
  """Parses a response; returns ('search' or 'answer', words, valid).

  As in the paper's code, the action is the first search or, if there is none,
  the first answer. A response is valid if it has exactly one opening tag and,
  if required, a thought. Without any action, ('', '', False) is returned.

  # Differs from the paper: its code requires no thought, and it also reads
  tags inside a thought.
  """
  thought = _THOUGHT.search(response)
  rest = _THOUGHT.sub('', response, count=1)
  actions = [
    (name.lower(), words.strip()) for name, words in _TAGGED.findall(rest)
  ]
  actions = sorted((a for a in actions if a[1]), key=lambda a: a[0] != 'search')
  if not actions:
    return '', '', False
  only_one = len(_OPENING.findall(rest)) == 1
  return *actions[0], only_one and bool(thought or not require_think)


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
    ):
      if value < 1:
        raise ValueError(f'env.{name}={value}: must be at least 1')
    narrator.check_style(prompt_style)
    self._folder = _data_folder(data_dir, generator)
    # Loaded here because it can take minutes for a large corpus: a worker's
    # start may take longer than a step.
    self._corpus = corpus.passages(self._folder)
    self._top_k, self._max_passage_chars = top_k, max_passage_chars
    self._max_steps, self._style = max_steps, prompt_style
    self._require_think = require_think
    self._history: collections.deque[turns.Turn] = collections.deque(
      maxlen=history_length
    )
    self._question: corpus.Question
    self._text = ''
    self._step = 0

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
    self._history.clear()
    self._step = 0
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    """Searches or answers; a response without an action uses up a step."""
    name, words, valid = project(response, require_think=self._require_think)
    self._step += 1
    success = name == 'answer' and is_correct(words, self._question.answers)
    done = name == 'answer' or self._step >= self._max_steps
    if name == 'search':
      self._text = self._search(words)
      self._history.append(turns.Turn(self._text, words))
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
  ) -> Iterator[tuple[str, str]]:
    """Plays an oracle that knows which passages to look up; yields each step.

    Args:
      task: the question to answer.
      noise: probability that a search uses a single word, of the query or of
        the question. A passage that was not found is searched for again.
      seed: seed of the noise.

    Yields:
      (prompt, response) of a step.

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
        action = f'<search>{query}</search>'
        passages = self._corpus.search(query, self._top_k)
        if missing[0] in [passage.title for passage in passages]:
          missing.pop(0)
      else:
        thought = 'I know the answer.'
        action = f'<answer>{self._question.answers[0]}</answer>'
      think = f'<think>{thought}</think>' if self._require_think else ''
      yield observation.prompt, f'{think}{action}'
      observation = self.step(f'{think}{action}').observation

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
    build = self._brief if self._style == 'brief' else self._paper
    return base.Observation(
      prompt=build(tuple(self._history)),
      short_prompt=build(tuple(self._history)[-1:]),
      anchor=self._text,
      text=self._text,
      task=self._question.text,
      actions=ACTIONS,
    )

  def _paper(self, history: Sequence[turns.Turn]) -> str:
    lines = [
      'You are an expert agent that answers questions by searching for '
      'information step by step.',
      f'Your question is: {self._question.text}',
    ]
    if self._step:
      lines.append(
        f'Before this step, you have already taken {self._step} of '
        f'{self._max_steps} step(s).'
      )
    if history:
      lines.append(
        'Here are your last searches, each with the information found:'
      )
    for turn in history:
      lines.append(f'<search>{turn.action}</search>')
      lines.append(f'<information>\n{turn.observation}\n</information>')
    think = _THINK if self._require_think else ''
    lines.append(f'\nNow it is your turn to act. {think}{_ACT}')
    return '\n'.join(lines)

  def _brief(self, history: Sequence[turns.Turn]) -> str:
    lines = [f'Question: {self._question.text}']
    for turn in history:
      lines += [f'> {turn.action}', turn.observation]
    return '\n'.join(lines)
