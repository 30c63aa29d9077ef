"""What a person is told of a phase."""

from silo_agent.rounds.effects import Activity, JournalActivity
from silo_agent.rounds.states import (
    Answering,
    Collecting,
    Complete,
    Evaluating,
    Fetching,
    Phase,
    Preparing,
    Refused,
    Reporting,
    Stopped,
    Training,
    Uploading,
)


def shown(phase: Phase) -> JournalActivity:
    """What a person is told of a phase."""
    match phase:
        case Preparing():
            return JournalActivity(Activity.PREPARING)
        case Fetching(order):
            return JournalActivity(Activity.FETCHING, order.key)
        case Collecting():
            return JournalActivity(Activity.FETCHING)
        case Training(order):
            return JournalActivity(Activity.TRAINING, order.key)
        case Uploading(order):
            return JournalActivity(Activity.UPLOADING, order.key)
        case Answering(order):
            return JournalActivity(Activity.MASKING, order.key)
        case Evaluating(order) | Reporting(order):
            return JournalActivity(Activity.EVALUATING, order.key)
        case Refused(detail=detail):
            return JournalActivity(Activity.REFUSING, detail=detail)
        case Complete():
            return JournalActivity(Activity.FINISHED)
        case Stopped():
            return JournalActivity(Activity.STOPPED)
        case _:
            return JournalActivity(Activity.WAITING)
