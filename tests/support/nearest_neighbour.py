"""The baseline that a trained model must beat: answer with the SQL of the most similar training question.

Similarity is the larger of two: overlap of words weighted by their rarity in training (IDF-weighted Jaccard), and
difflib's ratio on the words in order.
"""

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from math import log

from lorica.demo.silos.silos import Record

# difflib is slow; it re-ranks only the candidates that share the most words, which loses no close neighbour.
_CANDIDATES = 50


def nearest_neighbour_answers(train: Sequence[Record], questions: Sequence[str]) -> list[str]:
    """For each question the SQL of its most similar training question; ties go to the earlier record."""
    words = [tuple(record.question.split()) for record in train]
    seen = Counter(word for sentence in words for word in set(sentence))
    rarity = {word: log((1 + len(words)) / (1 + n)) + 1 for word, n in seen.items()}
    unseen = log(1 + len(words)) + 1

    def weight(bag: set[str]) -> float:
        return sum(rarity.get(word, unseen) for word in bag)

    answers = []
    for question in questions:
        asked = tuple(question.split())
        bag = set(asked)
        overlap = [weight(bag & set(sentence)) / weight(bag | set(sentence)) for sentence in words]
        candidates = sorted(range(len(train)), key=lambda i: -overlap[i])[:_CANDIDATES]
        best = max(candidates, key=lambda i: max(overlap[i], SequenceMatcher(None, words[i], asked).ratio()))
        answers.append(train[best].query)
    return answers
