"""What plans come to before they run, by example: noise, time on lines, rounding."""
