"""The arithmetic behind `kvredis plan`: break-even and verdicts from a shape and a few speeds. The command line
imports it."""
