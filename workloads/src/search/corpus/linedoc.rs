//! Line files as luceneutil writes them: one article a line, title, date and body between tabs.

use super::Article;
use std::io::{BufRead, Read};

/// The first line may name the columns instead.
const HEADER: &str = "FIELDS_HEADER_INDICATOR###";
/// A longer line is no article but a file of another kind.
const LONGEST_LINE: u64 = 64 * 1024 * 1024;

pub(super) struct LineDocs<R> {
    input: R,
    line: u64,
    bytes: Vec<u8>,
    title: usize,
    body: usize,
}

impl<R: BufRead> LineDocs<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input, line: 0, bytes: Vec::new(), title: 0, body: 2 }
    }

    fn read_line(&mut self) -> Result<Option<String>, String> {
        self.bytes.clear();
        self.line += 1;
        let line = self.line;
        let mut limited = Read::take(&mut self.input, LONGEST_LINE);
        let read = limited.read_until(b'\n', &mut self.bytes);
        match read.map_err(|error| format!("line {line} can't be read: {error}"))? {
            0 => return Ok(None),
            _ if !self.bytes.ends_with(b"\n") && self.bytes.len() as u64 == LONGEST_LINE => {
                return Err(format!("line {line} is longer than {LONGEST_LINE} bytes"));
            }
            _ => {}
        }
        let text = String::from_utf8(std::mem::take(&mut self.bytes));
        text.map(Some).map_err(|_| format!("line {line} is not UTF-8"))
    }

    fn read_header(&mut self, header: &str) -> Result<(), String> {
        let columns: Vec<&str> = header.trim_end().split('\t').skip(1).collect();
        let place = |name| columns.iter().position(|column| *column == name);
        match (place("title"), place("body")) {
            (Some(title), Some(body)) => {
                (self.title, self.body) = (title, body);
                Ok(())
            }
            _ => Err("the header names no title and body".to_owned()),
        }
    }

    fn article(&self, text: &str) -> Result<Article, String> {
        let cells: Vec<&str> = text.trim_end_matches(['\r', '\n']).split('\t').collect();
        match (cells.get(self.title), cells.get(self.body)) {
            (Some(title), Some(body)) => {
                Ok(Article { title: (*title).to_owned(), body: (*body).to_owned() })
            }
            _ => Err(format!("line {} has {} columns between tabs", self.line, cells.len())),
        }
    }
}

impl<R: BufRead> Iterator for LineDocs<R> {
    type Item = Result<Article, String>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let text = match self.read_line() {
                Ok(text) => text?,
                Err(problem) => return Some(Err(problem)),
            };
            if self.line == 1 && text.starts_with(HEADER) {
                match self.read_header(&text) {
                    Ok(()) => continue,
                    Err(problem) => return Some(Err(problem)),
                }
            }
            return Some(self.article(&text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Vec<Result<(String, String), String>> {
        LineDocs::new(text).map(|a| a.map(|a| (a.title, a.body))).collect()
    }

    fn pair(title: &str, body: &str) -> Result<(String, String), String> {
        Ok((title.to_owned(), body.to_owned()))
    }

    /// Goal: lines are articles, in the columns that a header names, or title, date, body. Method:
    /// both.
    #[test]
    fn lines_are_articles() {
        let expected = [pair("A", "a b"), pair("B", "")];
        assert_eq!(read(b"A\t2001\ta b\nB\t2002\t\n"), expected);
        let headed = b"FIELDS_HEADER_INDICATOR###\tbody\ttitle\na b\tA\n\tB";
        assert_eq!(read(headed), expected);
    }

    /// Goal: what is no article says where. Method: a line without tabs, one that isn't UTF-8, a
    /// bad header.
    #[test]
    fn bad_lines_are_placed() {
        let problem = |text: &[u8]| read(text).pop().expect("something").expect_err("a problem");
        assert_eq!(problem(b"A\td\tb\nno tabs\n"), "line 2 has 1 columns between tabs");
        assert_eq!(problem(b"A\td\t\xff\n"), "line 1 is not UTF-8");
        assert!(problem(b"FIELDS_HEADER_INDICATOR###\ta\tb\n").contains("header"));
    }
}
