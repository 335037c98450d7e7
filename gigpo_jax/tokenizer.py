"""Text to ids and back: the checkpoint's own tokenizer and chat template.

A thin face over `transformers` tokenizers, and `train`, which makes a small
byte-level BPE with Qwen's special tokens offline. Knows no environment.

Special tokens come from the chat template and `end_of_turn` only. A message or
response that spells one, such as <|im_start|>, is encoded as ordinary text.
"""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

OVERFLOW_POLICIES = ('error', 'drop_history', 'truncate_left')

END_OF_TURN = '<|im_end|>'
SPECIAL_TOKENS = ('<|endoftext|>', '<|im_start|>', END_OF_TURN)

# Qwen2's split into words: contractions, letters with a leading sign or
# blank, single digits, punctuation, newlines, blanks.
_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)

# ChatML as Qwen has it, without a default system prompt.
_CHAT_TEMPLATE = (
  '{% for message in messages %}'
  "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
  "+ '<|im_end|>' + '\n' }}"
  '{% endfor %}'
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


_GENERATION = 'generation_config.json'

# A message that a chat template has to render.
_PROBE = 'probe 123'


def _line(error: Exception) -> str:
  return f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'


class Tokenizer:
  """A checkpoint's tokenizer with its chat template.

  Args:
    directory: a Hugging Face directory that holds a tokenizer.
    enable_thinking: passed to the template; models that think by default
      (Qwen3) have a switch of this name, others ignore it.

  Raises:
    ValueError: in one line, if there is no tokenizer or no chat template, or
      one that does not work.
  """

  def __init__(self, directory: str, *, enable_thinking: bool = False):
    if not os.path.exists(os.path.join(directory, 'tokenizer_config.json')):
      raise ValueError(
        f'model.path={directory}: no tokenizer_config.json there; needs a '
        'Hugging Face directory with a tokenizer'
      )
    # Without them an empty one would be made.
    vocabularies = ('tokenizer.json', 'vocab.json')
    if not any(os.path.exists(f'{directory}/{v}') for v in vocabularies):
      raise ValueError(
        f'model.path={directory}: no {" or ".join(vocabularies)} there; needs '
        'a Hugging Face directory with a tokenizer'
      )
    try:
      # Nothing of the hub's, and no program of the checkpoint's own.
      self._hf = transformers.AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
      )
    except Exception as error:  # The libraries' own, of all sorts.
      raise ValueError(
        f'model.path={directory}: its tokenizer cannot be read '
        f'({_line(error)}); needs tokenizer.json and tokenizer_config.json'
      ) from error
    self.directory = directory
    self._enable_thinking = enable_thinking
    if not self._hf.chat_template:
      raise ValueError(
        f'model.path={directory}: its tokenizer has no chat template; use an '
        'instruction-tuned checkpoint'
      )
    special = [
      token.content
      for token in self._hf.added_tokens_decoder.values()
      if token.special
    ]
    # Of two that begin alike the longer.
    names = map(re.escape, sorted(special, key=len, reverse=True))
    self._special = re.compile('|'.join(names) or r'(?!)')
    self._more_stop_ids = self._generation_stop_ids()
    try:
      rendered = self._template(_PROBE)  # In a sandbox.
    except Exception as error:  # Whatever a template may do.
      raise ValueError(
        f'model.path={directory}: its chat template cannot be rendered '
        f'({_line(error)}); correct it, or use another checkpoint'
      ) from error
    if _PROBE not in rendered:
      raise ValueError(
        f'model.path={directory}: its chat template leaves out the message; '
        'correct it, or use another checkpoint'
      )

  @property
  def vocab_size(self) -> int:
    """Ids that mean something; a model may have more embedding rows."""
    return len(self._hf)

  @property
  def fingerprint(self) -> str:
    """Differs between tokenizers whose ids mean other things."""
    vocabulary = sorted((n, token) for token, n in self._hf.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Tokens that end a response: of the tokenizer and generation_config."""
    named = self._hf.convert_tokens_to_ids([END_OF_TURN, '<|endoftext|>'])
    ids = {*named} - {self._hf.unk_token_id}  # Of names that are not there.
    ids |= {self._hf.eos_token_id, *self._more_stop_ids}
    ids.discard(None)
    return tuple(sorted(ids))

  def _generation_stop_ids(self) -> list[int]:
    """Returns `eos_token_id` of generation_config.json."""
    path = pathlib.Path(self.directory) / _GENERATION
    if not path.is_file():
      return []
    try:
      found = json.loads(path.read_text(encoding='utf-8')).get('eos_token_id')
    except (OSError, ValueError, AttributeError, RecursionError) as error:
      raise ValueError(
        f'model.path={self.directory}: {_GENERATION} cannot be read '
        f'({_line(error)}); must be a JSON object'
      ) from error
    ids = [] if found is None else found
    ids = ids if isinstance(ids, list) else [ids]
    # bool is an int.
    if not all(type(n) is int and 0 <= n < self.vocab_size for n in ids):
      raise ValueError(
        f'model.path={self.directory}: {_GENERATION} has eos_token_id='
        f'{json.dumps(found)[:80]}; must be token ids below {self.vocab_size}'
      )
    return ids

  def render(self, prompts: Sequence[str]) -> list[np.ndarray]:
    """Returns the ids of each user message in the chat template, int32 [P]."""
    spells = [bool(self._special.search(prompt)) for prompt in prompts]
    plain = iter(
      self._encode(
        [
          self._template(prompt)
          for prompt, special in zip(prompts, spells, strict=True)
          if not special
        ]
      )
    )
    return [
      self._render_as_text(prompt) if special else next(plain)
      for prompt, special in zip(prompts, spells, strict=True)
    ]

  def _template(self, prompt: str) -> str:
    return self._hf.apply_chat_template(
      [{'role': 'user', 'content': prompt}],
      tokenize=False,
      add_generation_prompt=True,
      enable_thinking=self._enable_thinking,
    )

  def _render_as_text(self, prompt: str) -> np.ndarray:
    """Renders a message that spells special tokens, which stay text.

    The template gets a mark in place of each of them, so that all that it
    returns are its own.
    """
    # Marks that the message cannot hold.
    digest = hashlib.sha256(prompt.encode(errors='backslashreplace'))
    spelled = sorted(set(self._special.findall(prompt)))
    marks = {s: f'{digest.hexdigest()}{n:06}' for n, s in enumerate(spelled)}
    rendered = self._template(
      self._special.sub(lambda match: marks[match[0]], prompt)
    )
    ids = []
    for part in re.split(f'({self._special.pattern})', rendered):
      if self._special.fullmatch(part):
        ids += self._encode([part])
        continue
      for special, mark in marks.items():
        part = part.replace(mark, special)
      ids += self.encode([part])
    return np.concatenate(ids)

  def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the ids of each text, int32, nothing added, all of it as text."""
    return self._encode(texts, special=False)

  @property
  def end_of_turn(self) -> np.ndarray:
    """The ids that end a message, int32."""
    return self._encode([END_OF_TURN])[0]

  def _encode(
    self, texts: Sequence[str], *, special: bool = True
  ) -> list[np.ndarray]:
    if not texts:
      return []
    encoded = self._hf(
      list(texts), add_special_tokens=False, split_special_tokens=not special
    )
    return [np.asarray(ids, np.int32) for ids in encoded['input_ids']]

  def decode(self, ids: Sequence[np.ndarray]) -> list[str]:
    """Returns the text of each row of ids, special tokens left out."""
    return self._hf.batch_decode(
      [row.tolist() for row in ids],
      skip_special_tokens=True,
      clean_up_tokenization_spaces=False,
    )

  def stop_finder(
    self, strings: Sequence[str]
  ) -> Callable[[np.ndarray, int], int | None]:
    """Returns what finds the end of a response by strings.

    It takes ids so far and how many of them are new, and returns how many to
    keep, up to the token that completes a string; None if none is there.
    """
    longest = max(len(string.encode()) for string in strings)

    def find(ids: np.ndarray, new: int) -> int | None:
      # No token is shorter than a byte.
      start = max(0, len(ids) - new - longest)
      (text,) = self.decode([ids[start:]])
      if not any(string in text for string in strings):
        return None
      for end in range(len(ids) - new + 1, len(ids)):
        (text,) = self.decode([ids[start:end]])
        if any(string in text for string in strings):
          return end
      return len(ids)

    return find

  def fit(
    self,
    prompts: Sequence[str],
    short_prompts: Sequence[str],
    *,
    max_tokens: int,
    policy: str,
  ) -> list[tuple[np.ndarray, bool]]:
    """Renders prompts within a limit; returns (ids, whether shortened).

    Args:
      prompts: user messages.
      short_prompts: the same without history.
      max_tokens: limit of a rendered prompt.
      policy: 'error' refuses; 'drop_history' takes the short prompt, and if
        that is too long as well cuts it like 'truncate_left', which drops the
        oldest tokens of the message, the template's head kept.

    Raises:
      ValueError: under 'error', naming both lengths.
    """
    fitted = []
    for number, ids in enumerate(self.render(prompts)):
      shortened = len(ids) > max_tokens
      if shortened and policy == 'error':
        raise ValueError(
          f'rollout.max_prompt_tokens={max_tokens}: a prompt has {len(ids)} '
          'tokens; raise the limit or set rollout.prompt_overflow to '
          'drop_history or truncate_left'
        )
      if shortened and policy == 'drop_history':
        (ids,) = self.render([short_prompts[number]])
      if len(ids) > max_tokens:
        head = self._head_length()
        tail = max_tokens - head
        ids = np.concatenate([ids[:head], ids[len(ids) - tail :]])
      fitted.append((ids, shortened))
    return fitted

  def template_tokens(self) -> int:
    """Returns how many tokens the template takes around an empty message."""
    (ids,) = self.render([''])
    return len(ids)

  def save(self, directory: str) -> None:
    """Writes the tokenizer and its template as Hugging Face files."""
    self._hf.save_pretrained(directory)

  def _head_length(self) -> int:
    one, two = self.render(['a', 'b'])
    same = 0
    while one[same] == two[same]:
      same += 1
    return same


def train(texts: Iterable[str], directory: str, *, vocab_size: int) -> None:
  """Trains a byte-level BPE on texts and saves it, ready for `Tokenizer`.

  The result is an ordinary Hugging Face tokenizer directory with Qwen2's
  normalisation, word split, special tokens and ChatML template. The same texts
  give the same tokenizer.
  """
  bpe = tokenizers.Tokenizer(models.BPE(byte_fallback=False))
  bpe.normalizer = normalizers.NFC()
  bpe.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(_SPLIT), behavior='isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  bpe.decoder = decoders.ByteLevel()
  bpe.train_from_iterator(
    texts,
    trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=list(SPECIAL_TOKENS),
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=bpe,
    eos_token='<|im_end|>',
    pad_token='<|endoftext|>',
    padding_side='left',
  )
  hf.chat_template = _CHAT_TEMPLATE
  hf.save_pretrained(directory)
