//! The frame of a self-contained HTML page, for light and dark screens and for paper. It is
//! well-formed XML, so that any tool can read it.
//!
//! The page loads nothing: pictures and style are in the file, and a content security policy makes
//! the browser enforce this.

const STYLE: &str = include_str!("page.css");
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";

/// Makes a page. `style` is additional CSS for its pictures, `body` is HTML.
pub fn document(title: &str, style: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n\
         <meta charset=\"utf-8\"/>\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n\
         <link rel=\"icon\" href=\"data:,\"/>\n\
         <title>{title}</title>\n<style>\n{STYLE}{style}</style>\n</head>\n<body>\n{body}</body>\n\
         </html>\n"
    )
}

/// Escapes text for the inside of an element or an attribute. XML allows no control characters.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            '\n' | '\t' => escaped.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped() {
        assert_eq!(escape("<b a=\"'&\u{1b}\n"), "&lt;b a=&quot;&#39;&amp;\u{fffd}\n");
        assert!(document("<i>", "", "<p/>").contains("<title>&lt;i&gt;</title>"));
    }
}
