"""Orders of the coordinator to silos <-> `federation.proto`."""

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName
from silo_wire.canonical import digest_from_wire, digest_to_wire
from silo_wire.codecs.common_codec import (
    detail_from_wire,
    detail_to_wire,
    round_call_key,
    round_key_from_wire,
    seconds_from_wire,
)
from silo_wire.messages import (
    Evaluate,
    Finished,
    Mask,
    Order,
    Prepare,
    Standby,
    StandbyReason,
    Train,
)
from silo_wire.v1 import federation_pb2

_REASONS: dict[StandbyReason, federation_pb2.StandbyReason.ValueType] = {
    StandbyReason.NO_PLAN: federation_pb2.STANDBY_REASON_NO_PLAN,
    StandbyReason.GATHERING: federation_pb2.STANDBY_REASON_GATHERING,
    StandbyReason.UPDATE_RECEIVED: federation_pb2.STANDBY_REASON_UPDATE_RECEIVED,
    StandbyReason.NOT_IN_COHORT: federation_pb2.STANDBY_REASON_NOT_IN_COHORT,
    StandbyReason.AGGREGATING: federation_pb2.STANDBY_REASON_AGGREGATING,
    StandbyReason.STOPPED: federation_pb2.STANDBY_REASON_STOPPED,
    StandbyReason.TRAINED: federation_pb2.STANDBY_REASON_TRAINED,
}


def order_to_wire(order: Order, silo: SiloName) -> federation_pb2.Notice:
    match order:
        case Standby(reason, detail):
            return federation_pb2.Notice(
                standby=federation_pb2.Standby(reason=_REASONS[reason], detail=detail_to_wire(detail))
            )
        case Prepare(plan):
            return federation_pb2.Notice(prepare=federation_pb2.Prepare(plan_digest=digest_to_wire(plan)))
        case Train():
            return federation_pb2.Notice(
                train=federation_pb2.Train(
                    key=round_call_key(order.key, silo),
                    model_digest=digest_to_wire(order.model),
                    seconds_left=order.seconds_left,
                    included_update=digest_to_wire(order.included_update) if order.included_update else b"",
                )
            )
        case Mask():
            from silo_wire.codecs import masked_orders_codec

            return federation_pb2.Notice(mask=masked_orders_codec.mask_to_wire(order, silo))
        case Evaluate():
            return federation_pb2.Notice(
                evaluate=federation_pb2.Evaluate(
                    key=round_call_key(order.key, silo),
                    model_digest=digest_to_wire(order.model),
                    seconds_left=order.seconds_left,
                )
            )
        case Finished():
            return federation_pb2.Notice(
                finished=federation_pb2.Finished(
                    plan_digest=digest_to_wire(order.plan),
                    rounds=order.rounds,
                    final_model_digest=digest_to_wire(order.final_model),
                    best_model_digest=digest_to_wire(order.best_model),
                )
            )


def order_from_wire(notice: federation_pb2.Notice) -> Order:
    match notice.WhichOneof("order"):
        case "standby":
            for reason, number in _REASONS.items():
                if number == notice.standby.reason:
                    return Standby(reason, detail_from_wire(notice.standby.detail))
            raise MalformedMessage(f"standby reason {notice.standby.reason} is not known: update the agent")
        case "prepare":
            return Prepare(digest_from_wire(notice.prepare.plan_digest, "prepare plan_digest"))
        case "train":
            return Train(
                key=round_key_from_wire(notice.train.key),
                model=digest_from_wire(notice.train.model_digest, "train model_digest"),
                seconds_left=seconds_from_wire(notice.train.seconds_left),
                included_update=digest_from_wire(notice.train.included_update, "train included_update")
                if notice.train.included_update
                else None,
            )
        case "mask":
            from silo_wire.codecs import masked_orders_codec

            return masked_orders_codec.mask_from_wire(notice.mask)
        case "evaluate":
            return Evaluate(
                key=round_key_from_wire(notice.evaluate.key),
                model=digest_from_wire(notice.evaluate.model_digest, "evaluate model_digest"),
                seconds_left=seconds_from_wire(notice.evaluate.seconds_left),
            )
        case "finished":
            return Finished(
                plan=digest_from_wire(notice.finished.plan_digest, "finished plan_digest"),
                rounds=notice.finished.rounds,
                final_model=digest_from_wire(notice.finished.final_model_digest, "finished final_model_digest"),
                best_model=digest_from_wire(notice.finished.best_model_digest, "finished best_model_digest"),
            )
        case _:
            raise MalformedMessage("notice carries no order that this agent knows: update the agent")
