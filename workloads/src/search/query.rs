//! The query language: the classic Lucene forms that luceneutil's task files use.
//!
//! The forms are `word`, `+must`, `-not`, `"a phrase"`, `"near words"~2` and `word~1` (fuzzy).
//! `parse` turns text into clauses, and `build` turns clauses into tantivy queries. Only `build`
//! needs an index.

use tantivy::Term;
use tantivy::query::{BooleanQuery, FuzzyTermQuery, Occur, PhraseQuery, Query, TermQuery};
use tantivy::schema::{Field, IndexRecordOption};
use tantivy::tokenizer::TextAnalyzer;
use thiserror::Error;

const LONGEST_BYTES: usize = 4 * 1024;
const MOST_CLAUSES: usize = 64;
const MOST_PHRASE_WORDS: usize = 32;
/// tantivy supports at most this number of edits.
const MOST_EDITS: u8 = 2;
const WIDEST_SLOP: u32 = 1_000;

#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(super) enum QueryError {
    #[error("the query is empty")]
    Empty,
    #[error("the query is longer than {LONGEST_BYTES} bytes")]
    TooLong,
    #[error("the query has more than {MOST_CLAUSES} clauses")]
    TooManyClauses,
    #[error("a phrase has more than {MOST_PHRASE_WORDS} words")]
    LongPhrase,
    #[error("a quotation mark is not closed")]
    OpenQuote,
    #[error("`~` must be followed by a number: up to 2 after a word, up to 1000 after a phrase")]
    Tilde,
    #[error("a query must have a term that is not excluded")]
    OnlyExcludes,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Ask {
    Word(String),
    Fuzzy(String, u8),
    Phrase(String, u32),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Clause {
    occur: Occur,
    ask: Ask,
}

/// Splits the text into clauses.
pub(super) fn parse(text: &str) -> Result<Vec<Clause>, QueryError> {
    if text.len() > LONGEST_BYTES {
        return Err(QueryError::TooLong);
    }
    let mut rest = text.trim_start();
    let mut clauses = Vec::new();
    while !rest.is_empty() {
        if clauses.len() == MOST_CLAUSES {
            return Err(QueryError::TooManyClauses);
        }
        let (clause, after) = clause(rest)?;
        clauses.push(clause);
        rest = after.trim_start();
    }
    if clauses.is_empty() {
        return Err(QueryError::Empty);
    }
    if clauses.iter().all(|clause| clause.occur == Occur::MustNot) {
        return Err(QueryError::OnlyExcludes);
    }
    Ok(clauses)
}

fn clause(text: &str) -> Result<(Clause, &str), QueryError> {
    let (occur, text) = match text.as_bytes().first() {
        Some(b'+') => (Occur::Must, &text[1..]),
        Some(b'-') => (Occur::MustNot, &text[1..]),
        _ => (Occur::Should, text),
    };
    if let Some(quoted) = text.strip_prefix('"') {
        let end = quoted.find('"').ok_or(QueryError::OpenQuote)?;
        let (phrase, after) = (quoted[..end].to_owned(), &quoted[end + 1..]);
        let (slop, after) = match after.strip_prefix('~') {
            None => (0, after),
            Some(after) => {
                let (slop, after) = number(after)?;
                (slop.filter(|slop| *slop <= WIDEST_SLOP).ok_or(QueryError::Tilde)?, after)
            }
        };
        return Ok((Clause { occur, ask: Ask::Phrase(phrase, slop) }, after));
    }
    let end = text.find(|c: char| c.is_whitespace() || c == '"' || c == '~').unwrap_or(text.len());
    let (word, after) = (text[..end].to_owned(), &text[end..]);
    match after.strip_prefix('~') {
        None => Ok((Clause { occur, ask: Ask::Word(word) }, after)),
        Some(after) => {
            let (edits, after) = number(after)?;
            let edits = edits.unwrap_or(u32::from(MOST_EDITS));
            let edits = u8::try_from(edits).ok().filter(|edits| *edits <= MOST_EDITS);
            let edits = edits.ok_or(QueryError::Tilde)?;
            Ok((Clause { occur, ask: Ask::Fuzzy(word, edits) }, after))
        }
    }
}

/// Parses the digits at the start, if any.
fn number(text: &str) -> Result<(Option<u32>, &str), QueryError> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, after) = text.split_at(end);
    match digits {
        "" => Ok((None, after)),
        _ => Ok((Some(digits.parse().map_err(|_| QueryError::Tilde)?), after)),
    }
}

/// Converts the clauses to a query on one field. The field's analyzer splits words and converts
/// them to lower case.
pub(super) fn build(
    clauses: &[Clause],
    field: Field,
    analyzer: &mut TextAnalyzer,
) -> Result<Box<dyn Query>, QueryError> {
    let mut parts = Vec::with_capacity(clauses.len());
    for clause in clauses {
        // A word without letters and digits contributes nothing.
        if let Some(query) = part(&clause.ask, field, analyzer)? {
            parts.push((clause.occur, query));
        }
    }
    match parts.as_slice() {
        [] => Err(QueryError::Empty),
        [(Occur::Should | Occur::Must, _)] => Ok(parts.remove(0).1),
        _ => Ok(Box::new(BooleanQuery::new(parts))),
    }
}

fn part(
    ask: &Ask,
    field: Field,
    analyzer: &mut TextAnalyzer,
) -> Result<Option<Box<dyn Query>>, QueryError> {
    let (Ask::Word(text) | Ask::Fuzzy(text, _) | Ask::Phrase(text, _)) = ask;
    let mut terms = Vec::new();
    analyzer.token_stream(text).process(&mut |token| {
        terms.push(Term::from_field_text(field, &token.text));
    });
    if terms.len() > MOST_PHRASE_WORDS {
        return Err(QueryError::LongPhrase);
    }
    let slop = if let Ask::Phrase(_, slop) = ask { *slop } else { 0 };
    Ok(match (ask, terms.len()) {
        (_, 0) => None,
        (Ask::Fuzzy(_, edits), 1) => {
            Some(Box::new(FuzzyTermQuery::new(terms.remove(0), *edits, true)))
        }
        (_, 1) => Some(Box::new(TermQuery::new(terms.remove(0), IndexRecordOption::WithFreqs))),
        // If the analyzer splits a word, as in `state-of-the-art`, the parts become a phrase.
        _ => {
            let mut phrase = PhraseQuery::new(terms);
            phrase.set_slop(slop);
            Some(Box::new(phrase))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::index::SearchIndex;
    use crate::search::index::tests::index_of;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    const BODIES: [&str; 5] = [
        "the quick brown fox",
        "the quick red fox",
        "brown quick",
        "quack the duck",
        "Fox-trot, twice",
    ];

    fn found(query: &str) -> Vec<u64> {
        index_of(&BODIES)
            .search(query, 10)
            .expect("a good query")
            .top
            .iter()
            .map(|hit| hit.doc)
            .collect()
    }

    fn sorted(query: &str) -> Vec<u64> {
        let mut docs = found(query);
        docs.sort_unstable();
        docs
    }

    /// Goal: each form finds the documents that it should. Method: five small documents.
    #[test]
    fn forms_find_what_they_say() {
        assert_eq!(sorted("fox"), [0, 1, 4]);
        assert_eq!(sorted("FOX brown"), [0, 1, 2, 4]);
        assert_eq!(sorted("+fox +brown"), [0]);
        assert_eq!(sorted("fox -brown"), [1, 4]);
        assert_eq!(sorted("\"quick brown\""), [0]);
        assert_eq!(sorted("\"quick fox\""), [0_u64; 0]);
        assert_eq!(sorted("\"quick fox\"~1"), [0, 1]);
        assert_eq!(sorted("quack~1"), [0, 1, 2, 3]);
        assert_eq!(sorted("quack~0"), [3]);
        assert_eq!(sorted("fox-trot"), [4], "a word that is split is a phrase");
        assert_eq!(sorted("nowhere"), [0_u64; 0]);
    }

    /// Goal: an invalid query is refused with its reason. Method: each reason.
    #[test]
    fn bad_queries_are_refused() {
        let phrase = format!("\"{}\"", "a ".repeat(33));
        for (text, reason) in [
            ("", QueryError::Empty),
            ("  \t", QueryError::Empty),
            ("a \"b", QueryError::OpenQuote),
            ("a~3", QueryError::Tilde),
            ("a~99999999999", QueryError::Tilde),
            ("\"a b\"~1001", QueryError::Tilde),
            ("\"a b\"~", QueryError::Tilde),
            ("-a", QueryError::OnlyExcludes),
            (&"a ".repeat(65), QueryError::TooManyClauses),
            (&"a".repeat(4_097), QueryError::TooLong),
        ] {
            assert_eq!(parse(text), Err(reason), "{text:.20}");
        }
        let index = index_of(&BODIES);
        let reason =
            |text: &str| index.search(text, 1).map(|found| found.hits).expect_err("refused");
        assert!(reason(&phrase).to_string().contains("phrase"));
        assert!(reason("+++ ???").to_string().contains("empty"));
    }

    proptest! {
        /// Goal: parsing and searching never panic. Method: text of the grammar's characters, and
        /// any text.
        #[test]
        fn any_text_is_survived(
            grammar in "[-+~\" a-c0-9\u{e9}.]{0,60}", anything in "\\PC{0,60}",
        ) {
            static INDEX: LazyLock<SearchIndex> = LazyLock::new(|| index_of(&BODIES));
            for text in [grammar, anything] {
                if let Ok(found) = INDEX.search(&text, 3) {
                    prop_assert!(found.top.len() <= 3 && found.top.len() as u64 <= found.hits);
                }
            }
        }
    }
}
