"""Who is who: certificates, enrolment and keys, as pure functions over bytes. No I/O here, and no clock: `now` is an
argument."""
