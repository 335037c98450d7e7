"""Chat rendering, encode and decode, overflow, and training offline."""

import numpy as np
import pytest

from gigpo_jax import tokenizer

TEXTS = [
  'You arrive at desk 1. On the desk 1, you see a mug 2, and a pen 1.',
  '<think>I need to find a mug.</think><action>go to desk 1</action>',
  'Your task is to: put a mug in desk.',
] * 20


@pytest.fixture(name='text', scope='module')
def fixture_text(tmp_path_factory: pytest.TempPathFactory):
  directory = str(tmp_path_factory.mktemp('tokenizer'))
  tokenizer.train(TEXTS, directory, vocab_size=400)
  return tokenizer.Tokenizer(directory)


def test_render_is_chatml_and_ends_where_the_assistant_begins(text):
  (ids,) = text.render(['hello'])
  raw = text._hf.decode(ids)
  assert raw == '<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n'
  assert ids.dtype == np.int32


@pytest.mark.parametrize('sample', [*TEXTS[:3], 'naïve — 好的 🙂\n\n  x  1234'])
def test_round_trip_is_exact(text, sample: str):
  assert text.decode(text.encode([sample])) == [sample]


def test_special_tokens_stop_and_are_not_decoded(text):
  (ids,) = text.encode(['look<|im_end|>'])
  assert ids[-1] in text.stop_ids
  assert text.decode([ids]) == ['look']


def test_training_is_deterministic(tmp_path):
  files = []
  for name in ('a', 'b'):
    tokenizer.train(TEXTS, str(tmp_path / name), vocab_size=350)
    files.append((tmp_path / name / 'tokenizer.json').read_bytes())
  assert files[0] == files[1]


def test_overflow_policies(text):
  long, short = 'go to desk 1. ' * 50, 'go to desk 1.'
  (full,) = text.render([long])
  limit = len(full) // 2
  with pytest.raises(ValueError, match=f'{limit}: a prompt has {len(full)}'):
    text.fit([long], [short], max_tokens=limit, policy='error')
  ((ids, shortened),) = text.fit(
    [long], [short], max_tokens=limit, policy='drop_history'
  )
  assert shortened and np.array_equal(ids, text.render([short])[0])
  ((ids, shortened),) = text.fit(
    [long], [short], max_tokens=limit, policy='truncate_left'
  )
  assert shortened and len(ids) == limit
  # The template's head and the end of the message both survive.
  assert text._hf.decode(ids).startswith('<|im_start|>user\n')
  assert text._hf.decode(ids).endswith(
    'desk 1. <|im_end|>\n<|im_start|>assistant\n'
  )
  ((ids, shortened),) = text.fit(
    [short], [short], max_tokens=limit, policy='error'
  )
  assert not shortened


def test_a_directory_without_tokenizer_is_refused(tmp_path):
  with pytest.raises(ValueError, match='no tokenizer_config.json there'):
    tokenizer.Tokenizer(str(tmp_path))
