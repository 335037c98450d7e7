"""A scripted policy for `tool_env`, and its tokenizer."""

import pathlib

import numpy as np
import walks
from chat_templates import QWEN3

from gigpo_jax import sampler, tokenizer

CALL = (
  '<think>add</think><tool_call>\n'
  '{"name": "add", "arguments": {"a": %d, "b": 2}}\n</tool_call>'
)


def make_tokenizer(directory: pathlib.Path) -> tokenizer.Tokenizer:
  tokenizer.train([CALL] * 9, str(directory), vocab_size=300)
  (directory / 'chat_template.jinja').write_text(QWEN3)
  return tokenizer.Tokenizer(str(directory))


class Script(walks.RandomWalk):
  """Calls the tool, then answers; member 1 makes mistakes first."""

  def __init__(self, text):
    super().__init__()
    self._text = text

  def _answer(self, stream):
    _, _, task, member, step = stream
    right = [CALL % task, str(task + 2)]
    wrong = ['<tool_call>{"name": "add"', 'five']
    response = (wrong * member + right * 3)[step]
    (ids,) = self._text.encode([response])
    if response != 'five':  # As if it had reached the limit of tokens.
      ids = np.concatenate([ids, self._text.end_of_turn])
    log_probs = -np.arange(len(ids), dtype=np.float32)
    return sampler.Completion(ids, log_probs, log_probs, 'stop')
