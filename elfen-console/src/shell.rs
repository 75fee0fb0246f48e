//! Quotes words for a shell, so that printed commands can be typed.

/// The word, in quotes if it needs them.
pub fn word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=:,./%+@".contains(c);
    if word.chars().all(plain) && !word.is_empty() {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// The command line of this process, to be typed again.
pub fn command_line() -> String {
    let words = std::env::args_os().skip(1).map(|arg| word(&arg.to_string_lossy()));
    std::iter::once("elfen".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}
