//! Quotes words for a shell, so that users can copy printed commands.

/// The word, in quotes if it needs them.
pub fn word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=:,./%+@".contains(c);
    if word.chars().all(plain) && !word.is_empty() {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// The command line of this process, with `command` instead of the program's name, so that a user
/// can repeat it.
pub fn command_line(command: &str) -> String {
    let words = std::env::args_os().skip(1).map(|arg| word(&arg.to_string_lossy()));
    std::iter::once(command.to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}
