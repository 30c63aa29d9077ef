"""Text in, text out: summaries, answers, translations, labels, code.

A line has `id`, `input` and `target`; other keys are not read. What the model is given is the input alone.
"""

from typing import Final

from silo_agent.training.tasks import similarity
from silo_agent.training.tasks.text_task import TextTask

TEXT_TO_TEXT: Final = TextTask(
    name="text-to-text",
    scores={
        "exact_match": similarity.exact_match,
        "token_f1": similarity.token_f1,
        "rouge_l": similarity.rouge_l,
        "chrf": similarity.chrf,
        "bleu": similarity.bleu,
    },
    needs=("sacrebleu", "rapidfuzz"),
    remedy="install Lorica's wheel with the extra text",
)
