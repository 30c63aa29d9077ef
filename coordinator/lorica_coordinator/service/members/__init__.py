"""Who belongs to the federation: enrolment, certificates, authorities, who is connected."""
