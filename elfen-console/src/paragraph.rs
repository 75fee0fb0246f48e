//! Prose in lines of a width.

/// Lines of at most `columns`, broken between words; longer words stay whole, so that a command can
/// be copied. Names of devices and processes are in here, so nothing that a terminal obeys is let
/// through.
pub fn wrap(text: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let mut plain = String::with_capacity(word.len());
        for c in word.chars() {
            if c.is_control() { plain.extend(c.escape_default()) } else { plain.push(c) }
        }
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + plain.chars().count() <= columns => {
                *line += " ";
                *line += &plain;
            }
            _ => lines.push(plain),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: lines are full and no longer than allowed, a long word stays whole, and nothing that a
    /// terminal obeys comes through. Method: one text of each kind.
    #[test]
    fn lines_are_broken_between_words() {
        assert_eq!(wrap("a bc def", 4), ["a bc", "def"]);
        assert_eq!(wrap("a bc def", 3), ["a", "bc", "def"]);
        assert_eq!(wrap("of `/sys/devices` x", 6), ["of", "`/sys/devices`", "x"]);
        assert_eq!(wrap("été là", 6), ["été là"]);
        assert_eq!(wrap("a\u{1b}[31m\nb\u{7}", 20), ["a\\u{1b}[31m b\\u{7}"]);
        assert_eq!(wrap("", 20), Vec::<String>::new());
    }
}
