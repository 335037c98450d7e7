"""Converts text to index terms like Lucene's English analyzer.

Text is split at Unicode word boundaries (UAX 29) as Lucene interprets them.
Possessive endings are removed, letters are lower-cased and stop words are
removed. The stemmer is Porter's with its author's later changes (bli -> ble,
logi -> log), which nltk implements.
"""

import functools

import regex
from nltk.stem import porter

# Lucene splits longer tokens into pieces of this length.
_MAX_TOKEN_LENGTH = 255

_STOP_WORDS = frozenset(
  'a an and are as at be but by for if in into is it no not of on or such '
  'that the their then there these they this to was will with'.split()
)

# Characters that belong to the one before: accents, joiners, selectors.
_TAIL = r'[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*'
_LETTER = rf'[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]{_TAIL}'
_DIGIT = rf'\p{{WB=Numeric}}{_TAIL}'
_KATAKANA = rf'(?:\p{{WB=Katakana}}{_TAIL})+'
_JOINER = rf'(?:\p{{WB=ExtendNumLet}}{_TAIL})'
_QUOTE = r"\p{WB=MidNumLet}'"
_IN_WORD = rf'[\p{{WB=MidLetter}}{_QUOTE}]{_TAIL}'
_IN_NUMBER = rf'[\p{{WB=MidNum}}{_QUOTE}]{_TAIL}'
_CORE = (
  rf'(?:{_LETTER}(?:{_IN_WORD}{_LETTER})*|{_DIGIT}(?:{_IN_NUMBER}{_DIGIT})*)+'
)
_WORD = (
  rf'{_JOINER}*(?:{_CORE}|{_KATAKANA})'
  rf'(?:{_JOINER}+(?:{_CORE}|{_KATAKANA}))*{_JOINER}*'
)
# Extended_Pictographic as in the Unicode version of Lucene 8; Unicode 16 has
# removed some of these characters.
_PICTOGRAPH = (
  r'[\p{Extended_Pictographic}\u2388\u2600-\u2605\u2607-\u2612'
  r'\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2765-\u2767]'
)
_EMOJI = (
  rf'\p{{RI}}{_TAIL}\p{{RI}}{_TAIL}|[0-9#*]\uFE0F?\u20E3'
  rf'|{_PICTOGRAPH}[\uFE0F\p{{EMod}}]*(?:\u200D{_PICTOGRAPH}\uFE0F?)*{_TAIL}'
)
_COMPLEX = r'\p{LB=SA}+'
_SINGLE = rf'[\p{{Han}}\p{{Hiragana}}]{_TAIL}'
# Joiners alone are no token. They are read at once: the time would otherwise be
# quadratic in their number, which a policy chooses.
_JOINERS = regex.compile(f'{_JOINER}+', regex.VERSION1)
_TOKEN = regex.compile(
  f'{_EMOJI}|{_WORD}|{_COMPLEX}|{_SINGLE}|{_JOINER}+', regex.VERSION1
)

_stemmer = porter.PorterStemmer(mode=porter.PorterStemmer.MARTIN_EXTENSIONS)


def terms(text: str) -> list[str]:
  """Returns the index terms of a text, in order."""
  result = []
  for token in _TOKEN.findall(text):
    if _JOINERS.fullmatch(token):
      continue
    for start in range(0, len(token), _MAX_TOKEN_LENGTH):
      term = _to_term(token[start : start + _MAX_TOKEN_LENGTH])
      if term:
        result.append(term)
  return result


@functools.lru_cache(1 << 17)
def _to_term(token: str) -> str:
  """Returns the index term of a token; '' for a stop word."""
  if token[-2:] in ("'s", "'S", '’s', '’S', '＇s', '＇S'):
    token = token[:-2]
  token = token.lower()
  if token in _STOP_WORDS:
    return ''
  return _stemmer.stem(token, to_lowercase=False)
