"""Text to index terms, as Lucene's English analyzer makes them.

Word breaks of Unicode (UAX 29) with Lucene's reading of them; possessives
dropped; lower case; stop words; Porter's stemmer with its author's later
departures (bli -> ble, logi -> log), which nltk has.
"""

import functools

import regex
from nltk.stem import porter

# Lucene cuts longer tokens.
_LONGEST = 255

_STOP_WORDS = frozenset(
  'a an and are as at be but by for if in into is it no not of on or such '
  'that the their then there these they this to was will with'.split()
)

# What follows a character without counting: accents, joiners, selectors.
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
# Extended_Pictographic as Unicode had it when Lucene 8 was made, before 16.
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
_TOKEN = regex.compile(f'{_EMOJI}|{_WORD}|{_COMPLEX}|{_SINGLE}', regex.VERSION1)

_stemmer = porter.PorterStemmer(mode=porter.PorterStemmer.MARTIN_EXTENSIONS)


def terms(text: str) -> list[str]:
  """Returns the index terms of a text, in order."""
  found = []
  for token in _TOKEN.findall(text):
    for start in range(0, len(token), _LONGEST):
      term = _term(token[start : start + _LONGEST])
      if term:
        found.append(term)
  return found


@functools.lru_cache(1 << 17)
def _term(token: str) -> str:
  """Returns the term of a token; '' for a stop word."""
  if token[-2:] in ("'s", "'S", '’s', '’S', '＇s', '＇S'):
    token = token[:-2]
  token = token.lower()
  if token in _STOP_WORDS:
    return ''
  return _stemmer.stem(token, to_lowercase=False)
