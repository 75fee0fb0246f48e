//! Where documents come from: one stream of articles, whatever the source.

mod builtin;
mod input;
mod linedoc;
mod wikipedia;

pub(super) use builtin::Builtin;
use std::io;
use std::path::Path;
use thiserror::Error;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Article {
    pub(super) title: String,
    pub(super) body: String,
}

/// What is wrong with a source, and where.
#[derive(Debug, Error)]
pub(super) enum CorpusError {
    #[error("opening {path}: {error}; name a readable file")]
    Open { path: String, error: io::Error },
    #[error(
        "{path}, after {articles} articles: {problem}; get a whole copy, or ask for fewer --docs"
    )]
    Damaged { path: String, articles: u64, problem: String },
}

pub(super) type Articles = Box<dyn Iterator<Item = Result<Article, CorpusError>>>;

/// The articles of a Wikipedia XML dump, .bz2 or plain.
pub(super) fn wikipedia(path: &Path) -> Result<Articles, CorpusError> {
    Ok(numbered(path, wikipedia::Dump::new(open(path)?)))
}

/// The articles of a line file as luceneutil writes them, .bz2 or plain.
pub(super) fn line_docs(path: &Path) -> Result<Articles, CorpusError> {
    Ok(numbered(path, linedoc::LineDocs::new(open(path)?)))
}

fn open(path: &Path) -> Result<input::Input, CorpusError> {
    input::open(path).map_err(|error| CorpusError::Open { path: path.display().to_string(), error })
}

/// Gives each problem its place. A source ends at its first problem.
fn numbered(
    path: &Path,
    articles: impl Iterator<Item = Result<Article, String>> + 'static,
) -> Articles {
    let path = path.display().to_string();
    let mut failed = false;
    let placed = articles.zip(0..).map(move |(article, articles)| {
        let path = path.clone();
        article.map_err(|problem| CorpusError::Damaged { path, articles, problem })
    });
    Box::new(placed.take_while(move |article| {
        let before = failed;
        failed |= article.is_err();
        !before
    }))
}
