"""Random draws that protect: discrete Gaussian noise and Poisson samples, from AES-256 key streams."""
