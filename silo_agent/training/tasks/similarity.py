"""How much of an answer is right, from 0 to 1, by the usual measures of text: of one answer and one reference.

Answers are a model's, hence untrusted; TextTask cuts them. sacrebleu and rapidfuzz are installed with the extra `text`;
they are imported where a score is first asked for.
"""

import re
from collections import Counter
from typing import Final

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_WORDS: Final = re.compile(r"\w+")
_MOST_WORDS: Final = 4096
"""Of an answer and of a reference, in comparisons whose time grows with the product of both."""


def plain_words(text: str) -> list[str]:
    """In lower case, without punctuation and English articles, as SQuAD compares answers (Rajpurkar et al. 2016)."""
    return _WORDS.findall(_ARTICLES.sub(" ", text.casefold()))


def exact_match(answer: str, reference: str) -> float:
    """1 where both are the same text but for white space, else 0. For a label this is its accuracy."""
    return float(answer.split() == reference.split())


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of the share of the answer's words that are in the reference, and of the reference's in the answer,
    as SQuAD has it; 1 where neither has a word."""
    found, wanted = plain_words(answer), plain_words(reference)
    if not found or not wanted:
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted))


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of words in lower case (Lin 2004, with equal weight of precision and
    recall); 0 where either has no word. Words are letters and digits of any script, and are not stemmed."""
    from rapidfuzz.distance import LCSseq

    found, wanted = (_WORDS.findall(text.lower())[:_MOST_WORDS] for text in (answer, reference))
    if not found or not wanted:
        return 0.0
    return 2 * LCSseq.similarity(found, wanted) / (len(found) + len(wanted))


def chrf(answer: str, reference: str) -> float:
    """sacrebleu's sentence chrF2 (Popovic 2015): character n-grams up to 6, recall counting twice."""
    from sacrebleu import sentence_chrf

    return _share(sentence_chrf(answer, [reference]).score)


def bleu(answer: str, reference: str) -> float:
    """sacrebleu's sentence BLEU (Papineni et al. 2002) with its exponential smoothing and effective order. The mean
    over answers is not the BLEU of a corpus."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
    from sacrebleu.tokenizers.tokenizer_re import TokenizerRegexp

    score = BLEU(effective_order=True).sentence_score(answer, [reference]).score
    for tokenizer in (Tokenizer13a, TokenizerRegexp):  # which would keep 65,536 texts for good, and never find one
        tokenizer.__call__.cache_clear()
    return _share(score)


def _share(percent: float) -> float:
    return min(max(percent / 100.0, 0.0), 1.0)
