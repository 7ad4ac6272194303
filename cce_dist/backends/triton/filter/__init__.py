"""Columns that each block of tokens keeps, as lists on the device."""
