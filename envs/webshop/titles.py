"""How much two titles speak of the same thing: the nouns that they share.

The original tags titles with spaCy's en_core_web_sm, which PyPI does not
have. It is used where it is installed. Otherwise titles are cut by spaCy's
rules for English, written out below, and each word is tagged by itself with
TextBlob's lexicon. Of the official 1,000 titles, 992 are cut as spaCy cuts
them and 995 give the nouns of its cut; the title score of 83 of 83 recorded
purchases is as recorded, with the original engine and this tagger.

The two taggers can only differ about purchases of a WRONG product: one's own
title always shares all its nouns. How much hangs on them, from 20,000 random
pairs of products each (bought, wanted), anywhere in the shop and with the same
query (benchmarks/webshop_titles.py): TextBlob reading whole titles instead of
single words changes the type part of 1.0 % and 3.4 %, and whether it is 1 of
0.2 % and 2.7 %. Taking every word for a noun, which is worse than any tagger:
48 % and 25 %; 2 % and 16 %.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator

import regex

_MODEL = 'en_core_web_sm'

# spaCy's rules: signs leave the front and the back of a word one by one, then
# the rest is cut at signs within.
_SIGNS = (
  r'\.\.+|[…,:;!?¿؟¡()\[\]{}<>_#*&。？！，、；：～·।،۔؛٪]'
  r'|[\'"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉⟦⟧]|\p{So}|[—–]'
)
_UNITS = (
  'km|km²|km³|m|m²|m³|dm|dm²|dm³|cm|cm²|cm³|mm|mm²|mm³|ha|µm|nm|yd|in|ft|kg|g'
  '|mg|µg|t|lb|oz|m/s|km/h|mph|hPa|Pa|mbar|mb|MB|kb|KB|gb|GB|tb|TB|T|G|M|K|%'
)
_FRONT = regex.compile(rf'{_SIGNS}|[§%=]|\+(?![0-9])|\p{{Sc}}')
_BACK = regex.compile(
  rf"(?:{_SIGNS}|['’][sS]|(?<=[0-9])(?:\+|\p{{Sc}}|{_UNITS})"
  r'|(?<=[0-9\p{Ll}\p{P}²\-+])\.|(?<=\p{Lu}\p{Lu})\.)$'
)
_WITHIN = regex.compile(
  r'\.\.+|…|\p{So}|(?<=[0-9])[+\-*^](?=[0-9-])'
  r'|(?<=[\p{Ll}\p{Pi}\p{Pf}"])\.(?=[\p{Lu}\p{Pi}\p{Pf}"])'
  r'|(?<=\p{L}),(?=\p{L})|(?<=[\p{L}0-9])(?:--+|[-–—~:<>=/])(?=\p{L})'
)


def overlap(bought: str, wanted: str) -> float:
  """Returns the share of the wanted title's nouns that the bought one has.

  Nouns that a title repeats count once in the numerator and every time in the
  denominator, as in the original; 0.2 if the wanted title has none.
  """
  has, wants = nouns(bought), nouns(wanted)
  if not wants:
    return 0.2
  return len(set(has) & set(wants)) / len(wants)


@functools.lru_cache(65_536)
def nouns(title: str) -> tuple[str, ...]:
  """Returns the nouns and proper nouns of a title, lower-cased, in order."""
  return tagger()(title)


@functools.cache
def tagger() -> Callable[[str], tuple[str, ...]]:
  """Returns what finds nouns; loads it at the first call."""
  if importlib.util.find_spec(_MODEL):
    import spacy

    return functools.partial(_by_model, spacy.load(_MODEL))
  from textblob import en

  with warnings.catch_warnings():
    # It leaves the file of its lexicon to the garbage collector.
    warnings.simplefilter('ignore', ResourceWarning)
    en.parser.find_tags(['word'])

  @functools.lru_cache(65_536)
  def is_noun(word: str) -> bool:
    return en.parser.find_tags([word])[0][1].startswith('NN')

  return functools.partial(_by_lexicon, is_noun)


def _by_model(model: Callable, title: str) -> tuple[str, ...]:
  found = (t for t in model(title) if t.pos_ in ('NOUN', 'PROPN'))
  return tuple(t.text.lower() for t in found)


def _by_lexicon(is_noun: Callable[[str], bool], title: str) -> tuple[str, ...]:
  return tuple(word.lower() for word in words(title) if is_noun(word))


def words(title: str) -> list[str]:
  """Returns the words and signs of a title, cut about as spaCy cuts it."""
  found = []
  for word in title.split():
    tail = []
    while word:
      if front := _FRONT.match(word):
        found.append(front[0])
        word = word[front.end() :]
      elif back := _BACK.search(word):
        tail.append(back[0])
        word = word[: back.start()]
      else:
        break
    found += [*_cut(word), *reversed(tail)]
  return found


def _cut(word: str) -> Iterator[str]:
  start = 0
  for sign in _WITHIN.finditer(word):
    yield from filter(None, (word[start : sign.start()], sign[0]))
    start = sign.end()
  if word[start:]:
    yield word[start:]
