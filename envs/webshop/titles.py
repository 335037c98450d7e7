"""Title similarity: the share of nouns that two product titles have in common.

The original tags titles with spaCy's model en_core_web_sm, which is not on
PyPI. If the model is installed, this module uses it. Otherwise it splits titles
by a copy of spaCy's English rules and tags each word alone, with TextBlob's
lexicon. On the 1,000 official titles, 992 splits equal spaCy's, and 995 titles
give the same nouns as spaCy's split. For all 83 recorded purchases the title
score equals the recorded one, which the original engine computed with this
tagger.

The choice of the tagger only matters if a WRONG product is bought: a title
shares all nouns with itself. Its effect was measured on 20,000 random pairs
(bought, wanted) from the full shop, and 20,000 pairs with the same query
(benchmarks/webshop_titles.py). If TextBlob tags complete titles instead of
single words, the type score changes in 1.0 % and 3.4 % of the pairs; it changes
to or from 1 in 0.2 % and 2.7 %. If every word counts as a noun, which is worse
than any tagger, these are 48 % and 25 %, and 2 % and 16 %.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator

import regex

_MODEL = 'en_core_web_sm'

# spaCy's rules: punctuation is removed from the front and the back of a word
# one by one; the rest is split at the punctuation inside.
_PUNCTUATION = (
  r'\.\.+|[…,:;!?¿؟¡()\[\]{}<>_#*&。？！，、；：～·।،۔؛٪]'
  r'|[\'"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉⟦⟧]|\p{So}|[—–]'
)
_UNITS = (
  'km|km²|km³|m|m²|m³|dm|dm²|dm³|cm|cm²|cm³|mm|mm²|mm³|ha|µm|nm|yd|in|ft|kg|g'
  '|mg|µg|t|lb|oz|m/s|km/h|mph|hPa|Pa|mbar|mb|MB|kb|KB|gb|GB|tb|TB|T|G|M|K|%'
)
_PREFIX = regex.compile(rf'{_PUNCTUATION}|[§%=]|\+(?![0-9])|\p{{Sc}}')
_SUFFIX = regex.compile(
  rf"(?:{_PUNCTUATION}|['’][sS]|(?<=[0-9])(?:\+|\p{{Sc}}|{_UNITS})"
  r'|(?<=[0-9\p{Ll}\p{P}²\-+])\.|(?<=\p{Lu}\p{Lu})\.)$'
)
_INFIX = regex.compile(
  r'\.\.+|…|\p{So}|(?<=[0-9])[+\-*^](?=[0-9-])'
  r'|(?<=[\p{Ll}\p{Pi}\p{Pf}"])\.(?=[\p{Lu}\p{Pi}\p{Pf}"])'
  r'|(?<=\p{L}),(?=\p{L})|(?<=[\p{L}0-9])(?:--+|[-–—~:<>=/])(?=\p{L})'
)


def overlap(bought: str, wanted: str) -> float:
  """Returns the share of the wanted title's nouns that the bought title has.

  As in the original, a repeated noun counts once in the numerator and every
  time in the denominator. The result is 0.2 if the wanted title has no noun.

  Args:
    bought: title of the product that was bought.
    wanted: title of the goal product.
  """
  bought_nouns, wanted_nouns = nouns(bought), nouns(wanted)
  if not wanted_nouns:
    return 0.2
  return len(set(bought_nouns) & set(wanted_nouns)) / len(wanted_nouns)


@functools.lru_cache(65_536)
def nouns(title: str) -> tuple[str, ...]:
  """Returns the nouns and proper nouns of a title, lower-cased, in order."""
  return tagger()(title)


@functools.cache
def tagger() -> Callable[[str], tuple[str, ...]]:
  """Returns the function that finds the nouns of a title; loads it once."""
  if importlib.util.find_spec(_MODEL):
    import spacy

    return functools.partial(_by_model, spacy.load(_MODEL))
  from textblob import en

  with warnings.catch_warnings():
    # TextBlob does not close the file of its lexicon.
    warnings.simplefilter('ignore', ResourceWarning)
    en.parser.find_tags(['word'])

  @functools.lru_cache(65_536)
  def is_noun(word: str) -> bool:
    return en.parser.find_tags([word])[0][1].startswith('NN')

  return functools.partial(_by_lexicon, is_noun)


def _by_model(model: Callable, title: str) -> tuple[str, ...]:
  tokens = (t for t in model(title) if t.pos_ in ('NOUN', 'PROPN'))
  return tuple(t.text.lower() for t in tokens)


def _by_lexicon(is_noun: Callable[[str], bool], title: str) -> tuple[str, ...]:
  return tuple(word.lower() for word in words(title) if is_noun(word))


def words(title: str) -> list[str]:
  """Splits a title into words and punctuation, nearly always as spaCy does."""
  tokens = []
  for word in title.split():
    suffixes = []
    while word:
      if prefix := _PREFIX.match(word):
        tokens.append(prefix[0])
        word = word[prefix.end() :]
      elif suffix := _SUFFIX.search(word):
        suffixes.append(suffix[0])
        word = word[: suffix.start()]
      else:
        break
    tokens += [*_split_infixes(word), *reversed(suffixes)]
  return tokens


def _split_infixes(word: str) -> Iterator[str]:
  start = 0
  for infix in _INFIX.finditer(word):
    yield from filter(None, (word[start : infix.start()], infix[0]))
    start = infix.end()
  if word[start:]:
    yield word[start:]
