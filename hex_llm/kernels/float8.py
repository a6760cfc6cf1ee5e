"""float8_e4m3fn: numbers of 8 bits, of which 4 are exponent and 3 mantissa, with NaN and without infinity."""

LARGEST = 448.0
