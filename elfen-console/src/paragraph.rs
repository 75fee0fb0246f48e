//! Wraps prose into lines.

/// Breaks text between words into lines of at most `columns`. Longer words stay whole, so that
/// commands can be copied. Control characters are escaped: names of devices and processes may
/// contain terminal escapes.
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

    /// Goal: lines are full but not too long, long words stay whole, and no terminal escape
    /// remains. Method: one text of each kind.
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
