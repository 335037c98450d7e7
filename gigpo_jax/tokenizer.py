"""Convert text to token ids and back with a checkpoint's tokenizer.

A thin wrapper around the tokenizers and chat templates of `transformers`, and
`train`, which trains a small byte-level BPE with Qwen's special tokens offline.
This module does not depend on environments.

Special tokens come from the chat template and `end_of_turn` only. If a message
or response contains the text of a special token, such as <|im_start|>, it is
encoded as ordinary text. Added tokens without the flag `special`, such as
<think> and <tool_call> of Qwen3, delimit no message and are ordinary text that
happens to be one token: prompts name them, and models are trained to read them
so.
"""

import hashlib
import json
import os
import pathlib
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

OVERFLOW_POLICIES = ('error', 'drop_history', 'truncate_left', 'end')

END_OF_TURN = '<|im_end|>'
END_OF_TEXT = '<|endoftext|>'
SPECIAL_TOKENS = (END_OF_TEXT, '<|im_start|>', END_OF_TURN)

# Qwen2's split into words: contractions, letters with a leading sign or space,
# single digits, punctuation, newlines, spaces.
_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)

# Qwen's ChatML template, without a default system prompt. Tools are listed in a
# system message of their own, one a line.
_CHAT_TEMPLATE = (
  "{% if tools %}{{ '<|im_start|>system\n' }}"
  "{% for tool in tools %}{{ tool['function'] | tojson + '\n' }}{% endfor %}"
  "{{ '<|im_end|>' + '\n' }}{% endif %}"
  '{% for message in messages %}'
  "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
  "+ '<|im_end|>' + '\n' }}"
  '{% endfor %}'
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


_GENERATION = 'generation_config.json'

# Replaces the clock of a chat template. `trim_blocks` drops the newline.
_NO_CLOCK = (
  '{% macro strftime_now(format) %}{{ raise_exception('
  "'it calls strftime_now; prompts must not change with the date') }}"
  '{% endmacro %}\n'
)

# A message that the output of a chat template must contain.
_PROBE = 'probe 123'


class TemplateError(ValueError):
  """Raised if the chat template cannot render messages; in one line."""


def unique_text(texts: Iterable[str]) -> str:
  """Returns a text of 64 hexadecimal digits that none of the texts contains."""
  digest = hashlib.sha256()
  for text in texts:
    digest.update(text.encode(errors='backslashreplace'))
  return digest.hexdigest()


def _one_line(error: Exception) -> str:
  return f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'


class Tokenizer:
  """A checkpoint's tokenizer with its chat template.

  Args:
    directory: a Hugging Face directory with a tokenizer.
    enable_thinking: passed to the chat template; the templates of models that
      think by default (Qwen3) use it, others ignore it.

  Raises:
    ValueError: if the tokenizer or the chat template is missing or invalid; in
      one line.
  """

  def __init__(self, directory: str, *, enable_thinking: bool = False):
    if not os.path.exists(os.path.join(directory, 'tokenizer_config.json')):
      raise ValueError(
        f'model.path={directory}: no tokenizer_config.json; needs a Hugging '
        'Face directory with a tokenizer'
      )
    # Without these files, transformers would return an empty tokenizer.
    vocabularies = ('tokenizer.json', 'vocab.json')
    if not any(os.path.exists(f'{directory}/{v}') for v in vocabularies):
      raise ValueError(
        f'model.path={directory}: no {" or ".join(vocabularies)}; needs a '
        'Hugging Face directory with a tokenizer'
      )
    import transformers  # Takes half a second.

    try:
      # Do not access the hub or run code of the checkpoint.
      self._hf = transformers.AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
      )
    except Exception as error:  # The libraries raise errors of many types.
      raise ValueError(
        f'model.path={directory}: cannot read the tokenizer '
        f'({_one_line(error)}); needs tokenizer.json and tokenizer_config.json'
      ) from error
    self.directory = directory
    self._enable_thinking = enable_thinking
    if not self._hf.chat_template:
      raise ValueError(
        f'model.path={directory}: the tokenizer has no chat template; use an '
        'instruction-tuned checkpoint'
      )
    special = [
      token.content
      for token in self._hf.added_tokens_decoder.values()
      if token.special
    ]
    # Longer tokens first, so that they match before their prefixes.
    names = map(re.escape, sorted(special, key=len, reverse=True))
    self._special = re.compile('|'.join(names) or r'(?!)')
    self._more_stop_ids = self._generation_stop_ids()
    try:
      # transformers renders templates in a sandbox.
      rendered = self._template(_PROBE)
    except Exception as error:  # A template may raise any error.
      raise ValueError(
        f'model.path={directory}: cannot render the chat template '
        f'({_one_line(error)}); correct it, or use another checkpoint'
      ) from error
    if _PROBE not in rendered:
      raise ValueError(
        f'model.path={directory}: the chat template omits the message; '
        'correct it, or use another checkpoint'
      )

  @property
  def vocab_size(self) -> int:
    """Returns the number of token ids; a model may have more embeddings."""
    return len(self._hf)

  @property
  def fingerprint(self) -> str:
    """Returns a hash of the vocabulary, 16 hexadecimal digits."""
    vocabulary = sorted((n, token) for token, n in self._hf.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Returns the ids of tokens that end a response.

    They come from the tokenizer and from generation_config.json.
    """
    ids = {
      n
      for n, token in self._hf.added_tokens_decoder.items()
      if token.content in (END_OF_TURN, END_OF_TEXT)
    }
    ids |= {self._hf.eos_token_id, *self._more_stop_ids}
    ids.discard(None)
    return tuple(sorted(ids))

  def _generation_stop_ids(self) -> list[int]:
    """Returns `eos_token_id` of generation_config.json."""
    path = pathlib.Path(self.directory) / _GENERATION
    if not path.is_file():
      return []
    try:
      value = json.loads(path.read_text(encoding='utf-8')).get('eos_token_id')
    except (OSError, ValueError, AttributeError, RecursionError) as error:
      raise ValueError(
        f'model.path={self.directory}: cannot read {_GENERATION} '
        f'({_one_line(error)}); must be a JSON object'
      ) from error
    ids = [] if value is None else value
    ids = ids if isinstance(ids, list) else [ids]
    # `type` and not `isinstance`: a bool is an int.
    if not all(type(n) is int and 0 <= n < self.vocab_size for n in ids):
      raise ValueError(
        f'model.path={self.directory}: {_GENERATION} has eos_token_id='
        f'{json.dumps(value)[:80]}; must be token ids below {self.vocab_size}'
      )
    return ids

  def render(self, prompts: Sequence[str]) -> list[np.ndarray]:
    """Renders user messages in the chat template; returns ids, int32 [P] each.

    Args:
      prompts: user messages.

    Raises:
      TypeError: in one line, if they are not texts.
    """
    if isinstance(prompts, str) or not all(isinstance(p, str) for p in prompts):
      raise TypeError(
        f'prompts={reprlib.repr(prompts)}: must be a list of texts, one per '
        'prompt; `render_messages` renders a conversation'
      )
    contains_special = [
      bool(self._special.search(prompt)) for prompt in prompts
    ]
    plain = iter(
      self._encode(
        [
          self._template(prompt)
          for prompt, special in zip(prompts, contains_special, strict=True)
          if not special
        ]
      )
    )
    return [
      self._render_as_text(prompt) if special else next(plain)
      for prompt, special in zip(prompts, contains_special, strict=True)
    ]

  def _template(self, prompt: str) -> str:
    return self._apply([{'role': 'user', 'content': prompt}])

  def _apply(self, messages: list[dict[str, str]], **options: Any) -> str:
    template = self._hf.get_chat_template(tools=options.get('tools'))
    if 'strftime_now' in template:
      template = _NO_CLOCK + template
    return self._hf.apply_chat_template(
      messages,
      chat_template=template,
      tokenize=False,
      add_generation_prompt=True,
      enable_thinking=self._enable_thinking,
      **options,
    )

  def _render_as_text(self, prompt: str) -> np.ndarray:
    """Renders a message whose text contains special tokens, as plain text."""
    message = {'role': 'user', 'content': prompt}
    return self.encode_rendered(*self.render_messages([message]))

  def render_messages(
    self, messages: Sequence[dict[str, str]], tools: Sequence[str] = ()
  ) -> tuple[str, dict[str, str]]:
    """Renders a conversation up to the start of the next response.

    Placeholders replace special tokens in the messages, so every special token
    in the output of the template belongs to the template.

    Args:
      messages: fields of each message for the chat template, such as role and
        content.
      tools: functions that the policy can call, as JSON texts.

    Returns:
      The text, and the placeholders: special token -> placeholder.

    Raises:
      TemplateError: if the template raises an error.
    """
    # Without escapes, which would hide special tokens.
    tools = [json.dumps(json.loads(t), ensure_ascii=False) for t in tools]
    texts = [*tools, *(text for m in messages for text in m.values())]
    contained = sorted({s for t in texts for s in self._special.findall(t)})
    unique = unique_text(texts)
    placeholders = {s: f'{unique}{n:06}' for n, s in enumerate(contained)}

    def replace(text: str) -> str:
      return self._special.sub(lambda match: placeholders[match[0]], text)

    functions = [
      {'type': 'function', 'function': json.loads(replace(t))} for t in tools
    ]
    try:
      text = self._apply(
        [{k: replace(v) for k, v in m.items()} for m in messages],
        tools=functions or None,
      )
    except Exception as error:  # A template may raise any error.
      raise TemplateError(
        f'the chat template cannot render the messages ({_one_line(error)})'
      ) from error
    return text, placeholders

  def encode_rendered(
    self, text: str, placeholders: dict[str, str]
  ) -> np.ndarray:
    """Returns the int32 ids of a text from `render_messages`, or of a part."""
    ids = [np.zeros(0, np.int32)]
    for segment in re.split(f'({self._special.pattern})', text):
      if self._special.fullmatch(segment):
        ids += self._encode([segment])
        continue
      for special, placeholder in placeholders.items():
        segment = segment.replace(placeholder, special)
      ids += self.encode([segment])
    return np.concatenate(ids)

  def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the int32 ids of each text.

    No tokens are added, and special tokens are encoded as ordinary text.
    """
    return self._encode(texts, special=False)

  @property
  def end_of_turn(self) -> np.ndarray:
    """Returns the int32 ids of the token that ends a message."""
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
    """Returns the text of each sequence of ids, without special tokens."""
    return self._hf.batch_decode(
      [np.asarray(row).tolist() for row in ids],
      skip_special_tokens=True,
      clean_up_tokenization_spaces=False,
    )

  def stop_finder(
    self, strings: Sequence[str]
  ) -> Callable[[np.ndarray, int], int | None]:
    """Returns a function that finds the end of a response by stop strings.

    The function takes the ids so far and the number of new ids among them. It
    returns the number of ids to keep, up to the token that completes a stop
    string, or None if the response contains no stop string.

    Args:
      strings: the stop strings.
    """
    longest = max(len(string.encode()) for string in strings)
    added = self._hf.added_tokens_decoder
    special = [n for n, token in added.items() if token.special]

    def find(ids: np.ndarray, new: int) -> int | None:
      # A token has at least one byte, unless it is special.
      earlier = np.flatnonzero(~np.isin(ids[: len(ids) - new], special))
      start = earlier[-longest] if len(earlier) >= longest else 0
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
  ) -> list[tuple[np.ndarray | None, bool]]:
    """Renders prompts within a limit; returns a list of (ids, was shortened).

    Args:
      prompts: user messages.
      short_prompts: the same messages without history; '' for the same text.
      max_tokens: maximum length of a rendered prompt.
      policy: treatment of prompts that are too long. 'error' raises an
        error. 'truncate_left' removes tokens from the start of the message and
        keeps the head of the template. 'drop_history' uses the short prompt,
        and truncates it in the same way if it is still too long. 'end' returns
        None instead of ids.

    Raises:
      ValueError: if a prompt is too long under 'error', with both lengths.
    """
    fitted: list[tuple[np.ndarray | None, bool]] = []
    for index, ids in enumerate(self.render(prompts)):
      shortened = len(ids) > max_tokens
      if shortened and policy == 'error':
        raise ValueError(
          f'rollout.max_prompt_tokens={max_tokens}: a prompt has {len(ids)} '
          'tokens; raise the limit or set rollout.prompt_overflow to '
          'drop_history or truncate_left'
        )
      if shortened and policy == 'end':
        fitted.append((None, True))
        continue
      if shortened and policy == 'drop_history':
        (ids,) = self.render([short_prompts[index] or prompts[index]])
      if len(ids) > max_tokens:
        head = self.head_length()
        tail = max_tokens - head
        ids = np.concatenate([ids[:head], ids[len(ids) - tail :]])
      fitted.append((ids, shortened))
    return fitted

  def template_tokens(self) -> int:
    """Returns the number of tokens of a rendered empty message."""
    (ids,) = self.render([''])
    return len(ids)

  def save(self, directory: str) -> None:
    """Writes the tokenizer and its template as Hugging Face files.

    Args:
      directory: the target.
    """
    self._hf.save_pretrained(directory)

  def head_length(self) -> int:
    """Returns the number of template tokens before a message."""
    first, second = self.render(['a', 'b'])
    length = 0
    while first[length] == second[length]:
      length += 1
    return length


def train(texts: Iterable[str], directory: str, *, vocab_size: int) -> None:
  """Trains a byte-level BPE on texts and saves it for `Tokenizer`.

  The result is a Hugging Face tokenizer directory with Qwen2's normalization,
  word split, special tokens and ChatML template. The same texts give the same
  tokenizer.

  Args:
    texts: texts to train on.
    directory: the target.
    vocab_size: number of tokens.
  """
  import transformers

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
    eos_token=END_OF_TURN,
    pad_token=END_OF_TEXT,
    padding_side='left',
  )
  hf.chat_template = _CHAT_TEMPLATE
  hf.save_pretrained(directory)
