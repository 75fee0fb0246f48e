//! A results file as a user hands it in: perhaps cut off, perhaps something else altogether.

use crate::record::Line;

/// The lines of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    pub lines: Vec<Line>,
    /// The number of a last line without its end, which is left out: the run was interrupted.
    pub cut: Option<usize>,
}

/// Why a file is no results file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadFile {
    #[error("line {0} is no text")]
    NoText(usize),
    #[error("line {line}: {why}")]
    NoLine { line: usize, why: String },
}

/// Reads all lines, or names the first that is wrong.
pub fn read(bytes: &[u8]) -> Result<Results, BadFile> {
    let mut results = Results { lines: Vec::new(), cut: None };
    for (index, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
        let number = index + 1;
        let Some(line) = line.strip_suffix(b"\n") else {
            results.cut = Some(number);
            break;
        };
        let text = std::str::from_utf8(line).map_err(|_| BadFile::NoText(number))?;
        let line = serde_json::from_str(text).map_err(|error| {
            // The parser saw this line alone, and calls it line 1.
            let text = error.to_string();
            let why = text.rsplit_once(" at line ").map_or(text.as_str(), |(why, _)| why);
            BadFile::NoLine { line: number, why: why.to_owned() }
        })?;
        results.lines.push(line);
    }
    Ok(results)
}
