//! Words as a shell takes them, so that what we print can be typed.

/// In quotes if it needs them.
pub fn word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=:,./%+@".contains(c);
    match word.chars().all(plain) && !word.is_empty() {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// The command line of this process with `command` as its first words, so that it can be repeated.
pub fn command_line(command: &str) -> String {
    let words = std::env::args_os().skip(1).map(|arg| word(&arg.to_string_lossy()));
    std::iter::once(command.to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}
