"""Episodes of forced lengths: turns, prompt tokens and response tokens.

A policy with random weights never succeeds and never stops. `Lengths` draws the
lengths of a trained policy as pure functions of the task, the prompt and the
request. `Sampler`, `Tokenizer` and `Pool` wrap the real objects and enforce
these lengths, so that everything else in an iteration is real.
"""

import collections
import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envs import base
from gigpo_jax import sampler, tokenizer

# First seeds of the streams of random lengths.
_TURNS, _PROMPT, _RESPONSE = range(3)


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Distribution of the lengths of ALFWorld episodes.

  The defaults describe 1.5B-parameter policies in the middle of training: 24
  turns on average, of which 35 % of the episodes reach the limit.

  Attributes:
    max_turns: limit of turns.
    long_share: share of the episodes that reach the limit.
    short_turns: mean number of turns of the other episodes, uniform from 2 on.
    prompt_tokens: mean length of a prompt; the standard deviation is a fifth.
    response_tokens: mean length of a response, gamma-distributed with a
      standard deviation of half the mean.
    max_prompt_tokens: limit of a prompt.
    max_response_tokens: limit of a response.
  """

  max_turns: int = 50
  long_share: float = 0.35
  short_turns: int = 10
  prompt_tokens: int = 700
  response_tokens: int = 120
  max_prompt_tokens: int = 2048
  max_response_tokens: int = 512

  def turns(self, task: int, member: int) -> int:
    """Returns the number of turns of an episode."""
    rng = np.random.default_rng((_TURNS, task, member))
    if rng.random() < self.long_share:
      return self.max_turns
    longest = min(2 * self.short_turns - 2, self.max_turns)
    return int(rng.integers(2, longest + 1))

  def prompt(self, seed: int) -> int:
    """Returns the number of tokens of a prompt with a hash of `seed`."""
    rng = np.random.default_rng((_PROMPT, seed))
    drawn = rng.normal(self.prompt_tokens, self.prompt_tokens / 5)
    return int(np.clip(drawn, 1, self.max_prompt_tokens))

  def response(self, stream: Sequence[int]) -> int:
    """Returns the number of tokens of the response to a request."""
    rng = np.random.default_rng((_RESPONSE, *stream))
    drawn = rng.gamma(4.0, self.response_tokens / 4)
    return int(np.clip(drawn, 1, self.max_response_tokens))


class _Wrapper:
  """An object that passes on all attributes that it does not define."""

  def __init__(self, inner: Any):
    self._inner = inner

  def __getattr__(self, name: str) -> Any:
    return getattr(self._inner, name)


class Sampler(_Wrapper):
  """A sampler without stop tokens whose responses have given lengths.

  Args:
    inner: the sampler.
    response_tokens: maps the stream of a request to a number of tokens.
  """

  def __init__(
    self,
    inner: sampler.Sampler,
    response_tokens: Callable[[Sequence[int]], int],
  ):
    super().__init__(inner)
    self._response_tokens = response_tokens

  def submit(self, request: sampler.Request) -> int:
    """Submits a request with its forced length as the limit."""
    limit = self._response_tokens(request.stream)
    return self._inner.submit(dataclasses.replace(request, max_tokens=limit))


class Tokenizer(_Wrapper):
  """A tokenizer whose rendered prompts have given lengths.

  Prompts are tokenized as usual, then repeated or cut. The ids of responses may
  exceed the tokenizer's vocabulary.

  Args:
    inner: the tokenizer.
    prompt_tokens: maps a hash of the prompt to a number of tokens.
  """

  def __init__(
    self, inner: tokenizer.Tokenizer, prompt_tokens: Callable[[int], int]
  ):
    super().__init__(inner)
    self._prompt_tokens = prompt_tokens

  def fit(
    self, prompts: Sequence[str], short_prompts: Sequence[str], **kwargs: Any
  ) -> list[tuple[np.ndarray, bool]]:
    """Returns (ids, False) of each prompt."""
    fitted = self._inner.fit(prompts, short_prompts, **kwargs)
    lengths = [self._prompt_tokens(zlib.crc32(p.encode())) for p in prompts]
    return [
      (np.resize(ids, length), False)
      for (ids, _), length in zip(fitted, lengths, strict=True)
    ]

  def decode(self, ids: Sequence[np.ndarray]) -> list[str]:
    """Returns a text for each sequence of any ids."""
    return self._inner.decode([row % self._inner.vocab_size for row in ids])


class Pool(_Wrapper):
  """A pool of environments that ends episodes after given numbers of turns.

  The k-th reset to a task is its member k. An episode that resumes is member 0.

  Args:
    inner: the pool.
    turns: maps the index of a task and a member to a number of turns.
  """

  def __init__(self, inner: Any, turns: Callable[[int, int], int]):
    super().__init__(inner)
    self._turns = turns
    self._resets: dict[base.Task, int] = collections.defaultdict(int)
    # Turns that remain, by environment.
    self._remaining: dict[int, int] = {}

  def reset(self, env: int, task: base.Task) -> None:
    """Starts an episode."""
    self._remaining[env] = self._turns(task.index, self._resets[task])
    self._resets[task] += 1
    self._inner.reset(env, task)

  def resume(
    self, env: int, task: base.Task, responses: Sequence[str], replies: Sequence
  ) -> None:
    """Continues an episode."""
    self._remaining[env] = self._turns(task.index, 0) - len(responses)
    self._inner.resume(env, task, responses, replies)

  def receive(self, timeout_secs: float | None = None) -> list[tuple]:
    """Returns replies; the last one of an episode has no observation."""
    return [
      (env, self._shortened(env, reply))
      for env, reply in self._inner.receive(timeout_secs)
    ]

  def _shortened(self, env: int, reply: Any) -> Any:
    if not isinstance(reply, base.StepResult):
      return reply
    self._remaining[env] -= 1
    if self._remaining[env] or reply.observation is None:
      return reply
    self._inner.end(env)
    return dataclasses.replace(reply, observation=None, done=True)
