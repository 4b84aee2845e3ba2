"""The vocabulary of the pool: values and pure functions, no I/O.

Everything that enters the program is decoded once, at an adapter, into the records of this
package; everything above works on these records alone.
"""
