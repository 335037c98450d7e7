"""Search QA as the trainer sees it: a question, searches, an answer.

The third task of GiGPO's release (Search-R1's): `<search>words</search>` shows
the best passages of a corpus, `<answer>words</answer>` ends the episode and
pays 1 if it is right, word for word after SQuAD's normalisation.
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
  """Returns an answer as SQuAD compares it.

  In lower case, without punctuation, articles and superfluous blanks.
  """
  bare = text.lower().translate(_PUNCTUATION)
  return ' '.join(_ARTICLES.sub(' ', bare).split())


def is_right(answer: str, answers: Sequence[str]) -> bool:
  """Returns whether an answer is one of the right ones."""
  return normalize(answer) in map(normalize, answers)


def project(
  response: str, *, require_think: bool = True
) -> tuple[str, str, bool]:
  """Returns ('search' or 'answer', words, valid); ('', '', False) for neither.

  What is done is the first search, or else the first answer, as in the paper's
  code. Valid is one opening tag alone, and a thought if one is required.

  # Differs from the paper: its code asks for no thought; and a thought may
  speak of the tags here.
  """
  thought = _THOUGHT.search(response)
  rest = _THOUGHT.sub('', response, count=1)
  told = [
    (name.lower(), words.strip()) for name, words in _TAGGED.findall(rest)
  ]
  told = sorted((t for t in told if t[1]), key=lambda t: t[0] != 'search')
  if not told:
    return '', '', False
  alone = len(_OPENING.findall(rest)) == 1
  return *told[0], alone and bool(thought or not require_think)


@functools.lru_cache(maxsize=4)
def _made_up(options: str) -> pathlib.Path:
  # What generated files are a function of: the program and its arguments.
  program = pathlib.Path(madeup.__file__).read_bytes()
  return cache.ensure(
    cache.place('questions', program, options),
    functools.partial(madeup.write, **json.loads(options)),
  )


def _folder(
  data_dir: str | None = None, generator: dict | None = None, **others
) -> pathlib.Path:
  """Returns where the files are; makes them where none are given."""
  del others
  if data_dir:
    return pathlib.Path(data_dir).expanduser()
  try:
    madeup.check_options(**(generator or {}))
  except TypeError as error:
    raise ValueError(f'env.generator={generator}: {error}') from error
  return _made_up(json.dumps(generator or {}, sort_keys=True))


class Questions:
  """The questions of a split, by number."""

  def __init__(self, split: str, folder: pathlib.Path):
    self._questions = corpus.questions(folder, split)

  def __len__(self) -> int:
    return len(self._questions)

  def __getitem__(self, index: int) -> corpus.Question:
    return self._questions[index]

  def kind(self, index: int) -> str:
    """Returns the source or sort of a question."""
    return self[index].kind


def tasks(split: str, **kwargs) -> Questions:
  """Returns the questions of a split; takes the kwargs of `Env`."""
  return Env(**kwargs).questions(split)


class Env:
  """One question at a time.

  Args:
    data_dir: folder of the files; see `corpus`. None or '' makes them up.
    generator: options of `madeup.write`, for made-up ones.
    top_k: how many passages a search shows.
    max_passage_chars: how much of a passage is shown.
    max_steps: turns after which an unanswered question ends.
    history_length: K, how many past turns the prompt shows.
    prompt_style: one of `narrator.STYLES`.
    require_think: whether a response must hold a `<think>` part.

  Raises:
    ValueError: in one line, if an argument or the folder cannot be used.
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
    self._folder = _folder(data_dir, generator)
    # Here, while a worker starts: a large index takes its time.
    self._corpus = corpus.passages(self._folder)
    self._top_k, self._max_passage_chars = top_k, max_passage_chars
    self._max_steps, self._style = max_steps, prompt_style
    self._require_think = require_think
    self._history: collections.deque[turns.Turn] = collections.deque(
      maxlen=history_length
    )
    self._question: corpus.Question
    self._shown = ''
    self._step = 0

  def questions(self, split: str) -> Questions:
    """Returns the questions of a split."""
    return Questions(split, self._folder)

  def prepare(self, task: base.Task) -> None:
    """Reads the questions."""
    self.questions(task.split)

  def reset(self, task: base.Task) -> base.Observation:
    """Asks the question."""
    self._question = self.questions(task.split)[task.index]
    self._shown = self._question.text
    self._history.clear()
    self._step = 0
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    """Searches or answers; an invalid response does neither."""
    name, words, valid = project(response, require_think=self._require_think)
    self._step += 1
    success = name == 'answer' and is_right(words, self._question.answers)
    done = name == 'answer' or self._step >= self._max_steps
    if name == 'search':
      self._shown = self._found(words)
      self._history.append(turns.Turn(self._shown, words))
    end = f'Answer: {normalize(words)}' if name == 'answer' else self._shown
    return base.StepResult(
      observation=None if done else self._observe(),
      final_anchor=end if done else None,
      reward=SUCCESS_REWARD if success else 0.0,
      valid=valid,
      action=f'<{name}>{words}</{name}>' if name else '',
      success=success,
      done=done,
      metrics={'search_rate': float(name == 'search')},
    )

  def close(self) -> None:
    """Holds nothing of its own."""

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[str, str]]:
    """Yields (prompt, response) of one who knows what to look up.

    Args:
      task: the question.
      noise: probability that a search is for one word of its query, or of the
        question. What is not found is looked up again.
      seed: of the noise.

    Raises:
      ValueError: in one line, if the file does not say what to look up.
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
        found = self._corpus.search(query, self._top_k)
        if missing[0] in [passage.title for passage in found]:
          missing.pop(0)
      else:
        thought = 'I know the answer.'
        action = f'<answer>{self._question.answers[0]}</answer>'
      think = f'<think>{thought}</think>' if self._require_think else ''
      yield observation.prompt, f'{think}{action}'
      observation = self.step(f'{think}{action}').observation

  def _found(self, query: str) -> str:
    found = self._corpus.search(query, self._top_k)
    lines = [
      f'{passage.title}: {passage.text}'[: self._max_passage_chars]
      if self._style == 'brief'
      else f'Passage {n} (title: {passage.title}) '
      f'{passage.text[: self._max_passage_chars]}'
      for n, passage in enumerate(found, 1)
    ]
    return '\n'.join(lines) or NOTHING

  def _observe(self) -> base.Observation:
    tell = self._brief if self._style == 'brief' else self._paper
    return base.Observation(
      prompt=tell(tuple(self._history)),
      short_prompt=tell(tuple(self._history)[-1:]),
      anchor=self._shown,
      text=self._shown,
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
