"""The demo's largest silo: wards, doctors, patients, admissions and prescriptions of a hospital."""

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

CITIES: tuple[Value, ...] = ("leeds", "york", "bath", "derby", "dover", "bristol", "oxford", "exeter")
WARDS: tuple[Value, ...] = (
    "cardiology",
    "oncology",
    "maternity",
    "neurology",
    "surgery",
    "emergency",
    "intensive care",
    "radiology",
)
DOCTORS: tuple[Value, ...] = ("adams", "baker", "carter", "davis", "evans", "foster", "green", "hughes")
DIAGNOSES: tuple[Value, ...] = (
    "asthma",
    "diabetes",
    "pneumonia",
    "stroke",
    "influenza",
    "migraine",
    "fracture",
    "anemia",
)
DRUGS: tuple[Value, ...] = ("aspirin", "insulin", "ibuprofen", "penicillin", "morphine", "warfarin")
GENDERS: tuple[Value, ...] = ("male", "female")

HOSPITAL = SiloSpecification(
    name="hospital",
    train=1200,
    dev=80,
    test=120,
    tables=(
        Table(
            name="ward",
            rows=len(WARDS),
            columns=(key(), each_text("name", WARDS), number("floor", range(1, 7)), number("beds", range(8, 60))),
        ),
        Table(
            name="doctor",
            rows=60,
            columns=(
                key(),
                each_text("name", DOCTORS * 8),
                link("ward"),
                number("salary", range(40_000, 120_000, 500)),
            ),
        ),
        Table(
            name="patient",
            rows=600,
            columns=(
                key(),
                text("name", PEOPLE),
                text("city", CITIES),
                text("gender", GENDERS),
                number("age", range(1, 96)),
            ),
        ),
        Table(
            name="admission",
            rows=2400,
            columns=(
                key(),
                link("patient"),
                link("doctor"),
                text("diagnosis", DIAGNOSES),
                number("year", range(2016, 2024)),
                number("days", range(1, 40)),
                number("cost", range(200, 20_000, 10)),
            ),
        ),
        Table(
            name="prescription",
            rows=1500,
            columns=(key(), link("patient"), text("drug", DRUGS), number("dose", range(5, 500, 5))),
        ),
    ),
    pools={
        "city": CITIES,
        "ward": WARDS,
        "doctor": DOCTORS,
        "diagnosis": DIAGNOSES,
        "drug": DRUGS,
        "gender": GENDERS,
        "year": tuple(range(2016, 2024)),
        "age": (20, 30, 40, 50, 60, 70),
        "salary": (50_000, 60_000, 70_000, 80_000),
        "dose": (50, 100, 200, 300),
        "top": (3, 5, 10),
    },
    shapes=(
        Shape(
            "SELECT COUNT(*) FROM patient WHERE city = '{city}' AND age > {age}",
            (
                "how many patients from {city} are older than {age}",
                "count the {city} patients above age {age}",
                "number of patients over {age} living in {city}",
            ),
        ),
        Shape(
            "SELECT name FROM patient WHERE city = '{city}' AND age < {age}",
            (
                "which patients from {city} are younger than {age}",
                "list the {city} patients below age {age}",
                "names of patients under {age} living in {city}",
            ),
        ),
        Shape(
            "SELECT AVG(age) FROM patient WHERE city = '{city}' AND gender = '{gender}'",
            (
                "what is the average age of {gender} patients from {city}",
                "mean age of {gender} patients living in {city}",
            ),
        ),
        Shape(
            "SELECT name FROM patient WHERE city = '{city}' ORDER BY age DESC LIMIT {top}",
            ("who are the {top} oldest patients from {city}", "list the {top} oldest patients living in {city}"),
        ),
        Shape(
            "SELECT COUNT(*) FROM admission WHERE diagnosis = '{diagnosis}' AND year = {year}",
            (
                "how many admissions for {diagnosis} were there in {year}",
                "count the {diagnosis} admissions of {year}",
                "number of {year} admissions with {diagnosis}",
            ),
        ),
        Shape(
            "SELECT AVG(cost) FROM admission WHERE diagnosis = '{diagnosis}' AND year = {year}",
            (
                "what was the average cost of {diagnosis} admissions in {year}",
                "mean cost of an admission for {diagnosis} in {year}",
                "average cost of the {year} admissions with {diagnosis}",
            ),
        ),
        Shape(
            "SELECT MAX(days) FROM admission WHERE diagnosis = '{diagnosis}' AND year = {year}",
            (
                "how long was the longest stay for {diagnosis} in {year}",
                "longest {diagnosis} stay in {year}",
                "most days in hospital for {diagnosis} in {year}",
            ),
        ),
        Shape(
            "SELECT patient.name FROM patient JOIN admission ON admission.patient_id = patient.id"
            " WHERE admission.diagnosis = '{diagnosis}' AND patient.city = '{city}'",
            (
                "which patients from {city} were admitted for {diagnosis}",
                "list the patients living in {city} admitted with {diagnosis}",
                "names of {city} patients admitted for {diagnosis}",
            ),
        ),
        Shape(
            "SELECT doctor.name FROM doctor JOIN ward ON doctor.ward_id = ward.id"
            " WHERE ward.name = '{ward}' AND doctor.salary > {salary}",
            (
                "which doctors of the {ward} ward earn more than {salary}",
                "list the doctors in {ward} with a salary above {salary}",
            ),
        ),
        Shape(
            "SELECT SUM(admission.cost) FROM admission JOIN doctor ON admission.doctor_id = doctor.id"
            " WHERE doctor.name = '{doctor}' AND admission.year = {year}",
            (
                "what was the total cost of admissions under doctor {doctor} in {year}",
                "total cost of the {year} admissions of doctor {doctor}",
                "how much did the admissions of doctor {doctor} cost in {year}",
            ),
        ),
        Shape(
            "SELECT COUNT(*) FROM admission JOIN doctor ON admission.doctor_id = doctor.id"
            " WHERE doctor.name = '{doctor}' AND admission.diagnosis = '{diagnosis}'",
            (
                "how many {diagnosis} admissions did doctor {doctor} treat",
                "count the admissions of doctor {doctor} with {diagnosis}",
                "number of {diagnosis} admissions under doctor {doctor}",
            ),
        ),
        Shape(
            "SELECT COUNT(DISTINCT patient_id) FROM prescription WHERE drug = '{drug}' AND dose > {dose}",
            (
                "how many patients take {drug} at a dose above {dose}",
                "count the patients with more than {dose} of {drug}",
            ),
        ),
        Shape(
            "SELECT patient.name FROM patient JOIN prescription ON prescription.patient_id = patient.id"
            " WHERE prescription.drug = '{drug}' AND patient.age > {age}",
            (
                "which patients older than {age} take {drug}",
                "list the patients over {age} who were prescribed {drug}",
            ),
        ),
        Shape(
            "SELECT gender, COUNT(*) FROM patient WHERE city = '{city}' AND age > {age} GROUP BY gender",
            (
                "how many patients from {city} older than {age} are there of each gender",
                "for each gender count the patients over {age} living in {city}",
            ),
        ),
        Shape(
            "SELECT diagnosis, AVG(days) FROM admission WHERE year = {year}"
            " GROUP BY diagnosis ORDER BY AVG(days) DESC LIMIT {top}",
            (
                "which {top} diagnoses had the longest average stay in {year}",
                "top {top} diagnoses of {year} by average stay",
            ),
        ),
    ),
)
