//! `elfen profile` and its subcommands: arguments, messages and output.
