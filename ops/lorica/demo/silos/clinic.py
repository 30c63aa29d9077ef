"""The demo's smallest silo: the doctors, patients and visits of a small clinic."""

from lorica.demo.silos.specification import (
    PEOPLE,
    Shape,
    SiloSpecification,
    Table,
    Value,
    each_text,
    key,
    link,
    number,
    text,
)

CITIES: tuple[Value, ...] = ("leeds", "york", "bath", "derby", "dover")
DOCTORS: tuple[Value, ...] = ("adams", "baker", "carter", "davis", "evans")
REASONS: tuple[Value, ...] = ("allergy", "cough", "fever", "headache", "vaccination")

CLINIC = SiloSpecification(
    name="clinic",
    train=120,
    dev=24,
    test=40,
    tables=(
        Table(
            name="doctor",
            rows=len(DOCTORS),
            columns=(key(), each_text("name", DOCTORS), number("room", range(1, 30))),
        ),
        Table(
            name="patient",
            rows=240,
            columns=(key(), text("name", PEOPLE), text("city", CITIES), number("age", range(1, 96))),
        ),
        Table(
            name="visit",
            rows=1200,
            columns=(
                key(),
                link("patient"),
                link("doctor"),
                text("reason", REASONS),
                number("year", range(2019, 2024)),
                number("fee", range(20, 300)),
            ),
        ),
    ),
    pools={
        "city": CITIES,
        "doctor": DOCTORS,
        "reason": REASONS,
        "year": tuple(range(2019, 2024)),
        "age": (20, 40, 60, 70),
        "top": (3, 5, 10),
    },
    shapes=(
        Shape(
            "SELECT COUNT(*) FROM patient WHERE city = '{city}' AND age > {age}",
            (
                "how many clinic patients from {city} are older than {age}",
                "count the clinic patients from {city} above age {age}",
                "number of clinic patients over {age} from {city}",
            ),
        ),
        Shape(
            "SELECT name FROM patient WHERE city = '{city}' AND age < {age}",
            (
                "which clinic patients from {city} are younger than {age}",
                "list the clinic patients from {city} below age {age}",
                "names of clinic patients under {age} from {city}",
            ),
        ),
        Shape(
            "SELECT name FROM patient WHERE city = '{city}' ORDER BY age DESC LIMIT {top}",
            (
                "who are the {top} oldest clinic patients from {city}",
                "list the {top} oldest clinic patients from {city}",
            ),
        ),
        Shape(
            "SELECT COUNT(*) FROM visit WHERE reason = '{reason}' AND year = {year}",
            (
                "how many visits for {reason} were there in {year}",
                "count the {reason} visits of {year}",
                "number of {year} visits for {reason}",
            ),
        ),
        Shape(
            "SELECT AVG(fee) FROM visit WHERE reason = '{reason}' AND year = {year}",
            (
                "what was the average fee of {reason} visits in {year}",
                "mean fee of a visit for {reason} in {year}",
                "average fee for {reason} visits of {year}",
            ),
        ),
        Shape(
            "SELECT MAX(fee) FROM visit WHERE reason = '{reason}' AND year = {year}",
            (
                "what was the highest fee of {reason} visits in {year}",
                "maximum fee of a visit for {reason} in {year}",
            ),
        ),
        Shape(
            "SELECT patient.name FROM patient JOIN visit ON visit.patient_id = patient.id"
            " WHERE visit.reason = '{reason}' AND patient.city = '{city}'",
            (
                "which patients from {city} came for {reason}",
                "list the patients from {city} who came for {reason}",
            ),
        ),
        Shape(
            "SELECT SUM(visit.fee) FROM visit JOIN doctor ON visit.doctor_id = doctor.id"
            " WHERE doctor.name = '{doctor}' AND visit.year = {year}",
            (
                "what was the total fee of visits to doctor {doctor} in {year}",
                "total fee of the {year} visits to doctor {doctor}",
            ),
        ),
        Shape(
            "SELECT COUNT(*) FROM visit JOIN doctor ON visit.doctor_id = doctor.id"
            " WHERE doctor.name = '{doctor}' AND visit.reason = '{reason}'",
            (
                "how many {reason} visits did doctor {doctor} have",
                "count the visits to doctor {doctor} for {reason}",
                "number of {reason} visits to doctor {doctor}",
            ),
        ),
        Shape(
            "SELECT reason, COUNT(*) FROM visit WHERE year = {year} GROUP BY reason ORDER BY COUNT(*) DESC LIMIT {top}",
            (
                "what were the {top} most common reasons for a visit in {year}",
                "top {top} reasons of visits in {year}",
            ),
        ),
    ),
)
