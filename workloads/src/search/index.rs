//! The index on disk: how it is built, verified and searched.
//!
//! A build writes into a folder next to the destination, with the manifest last. When everything is
//! on disk, the folder is renamed to the destination. So the destination is complete even if a
//! build is interrupted. Opening verifies the manifest, the checksum of every file, and the number
//! of documents. An index has one segment, which is mapped into memory and searched on the calling
//! thread.

use super::corpus::Article;
use super::query::{self, QueryError};
use crate::batch::checksum;
use crate::process::interrupted;
use elfen_console::failure::{Failure, Status};
use elfen_console::output;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tantivy::collector::{Collector, Count, SegmentCollector, TopDocs};
use tantivy::indexer::NoMergePolicy;
use tantivy::schema::{
    Field, IndexRecordOption, STORED, Schema, TantivyDocument, TextFieldIndexing, TextOptions,
    Value,
};
use tantivy::tokenizer::TextAnalyzer;
use tantivy::{
    DocId, Index, IndexWriter, ReloadPolicy, Score, Searcher, SegmentOrdinal, SegmentReader,
};
use thiserror::Error;

const MANIFEST: &str = "elfen-search.json";
const LOCK: &str = "building.lock";
const FORMAT: u32 = 1;
/// A tokenizer that is built into tantivy: words of letters and digits, in lower case.
const TOKENIZER: &str = "default";
const WRITER_BYTES: usize = 256 * 1024 * 1024;
/// Only the titles of the few best hits are read.
const STORE_CACHE_BLOCKS: usize = 16;

/// The error of a failed build, which leaves its destination unchanged.
fn unbuilt(what: String, why: impl fmt::Display) -> Failure {
    Failure::new(Status::Failed, what, why, "nothing was changed at the destination")
}

/// The manifest. It is the last file that a build writes, and the first that `open` reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    format: u32,
    pub(crate) documents: u64,
    pub(crate) source: Source,
    /// A checksum of all titles and bodies. Equal corpora have equal checksums on all machines.
    pub(crate) corpus_checksum: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Source {
    Builtin { seed: u64 },
}

struct Fields {
    number: Field,
    title: Field,
    body: Field,
}

impl Fields {
    fn schema() -> (Schema, Self) {
        let mut schema = Schema::builder();
        let positions = TextFieldIndexing::default()
            .set_tokenizer(TOKENIZER)
            .set_index_option(IndexRecordOption::WithFreqsAndPositions);
        let number = schema.add_u64_field("number", STORED);
        let title = schema.add_text_field("title", STORED);
        let body =
            schema.add_text_field("body", TextOptions::default().set_indexing_options(positions));
        (schema.build(), Self { number, title, body })
    }
}

/// Builds the index of the first `limit` articles in `dir`.
pub(crate) fn build(
    articles: impl Iterator<Item = Article>,
    limit: u64,
    source: Source,
    dir: &Path,
    force: bool,
) -> Result<Manifest, Failure> {
    if dir.exists() && !force {
        let fix = "choose another folder, or replace it with --force";
        return Err(Failure::new(Status::Usage, dir.display(), "it exists already", fix));
    }
    let staging = Staging::new(dir)?;
    let (documents, sum) = write_segment(articles, limit, &staging.path)?;
    let corpus_checksum = format!("{sum:016x}");
    let manifest = Manifest { format: FORMAT, documents, source, corpus_checksum };
    staging.finish(&manifest, dir)?;
    Ok(manifest)
}

fn write_segment(
    articles: impl Iterator<Item = Article>,
    limit: u64,
    dir: &Path,
) -> Result<(u64, u64), Failure> {
    let failed =
        |error: tantivy::TantivyError| unbuilt(format!("indexing into {}", dir.display()), error);
    let (schema, fields) = Fields::schema();
    let index = Index::create_in_dir(dir, schema).map_err(failed)?;
    let mut writer: IndexWriter = index.writer_with_num_threads(1, WRITER_BYTES).map_err(failed)?;
    writer.set_merge_policy(Box::new(NoMergePolicy));
    let (mut documents, mut sum) = (0, 0);
    for article in articles.take(usize::try_from(limit).unwrap_or(usize::MAX)) {
        if interrupted() {
            return Err(unbuilt("building the index".to_owned(), "interrupted"));
        }
        sum ^=
            checksum(article.title.as_bytes()).rotate_left(1) ^ checksum(article.body.as_bytes());
        sum = sum.rotate_left(7).wrapping_add(documents);
        let mut document = TantivyDocument::new();
        document.add_u64(fields.number, documents);
        document.add_text(fields.title, article.title);
        document.add_text(fields.body, article.body);
        writer.add_document(document).map_err(failed)?;
        documents += 1;
    }
    writer.commit().map_err(failed)?;
    let segments = index.searchable_segment_ids().map_err(failed)?;
    if segments.len() > 1 {
        writer.merge(&segments).wait().map_err(failed)?;
    }
    writer.garbage_collect_files().wait().map_err(failed)?;
    writer.wait_merging_threads().map_err(failed)?;
    Ok((documents, sum))
}

/// The folder in which an index is built. It is removed unless the build finishes.
struct Staging {
    path: PathBuf,
    /// Locked while this process builds here. The kernel releases the lock when the process ends.
    _lock: File,
}

impl Staging {
    fn new(dir: &Path) -> Result<Self, Failure> {
        let mut name = OsString::from(".");
        name.push(dir.file_name().unwrap_or_default());
        name.push(".building");
        let path = dir.with_file_name(name);
        let io = |what: &str| {
            let what = format!("{what} {}", path.display());
            move |error: io::Error| unbuilt(what, error)
        };
        fs::create_dir_all(&path).map_err(io("making"))?;
        let lock = File::create(path.join(LOCK)).map_err(io("locking"))?;
        if lock.try_lock().is_err() {
            let why = "another process is building it";
            return Err(Failure::new(Status::Failed, dir.display(), why, "wait for it, or end it"));
        }
        // Removes the files of a build that was killed.
        for entry in fs::read_dir(&path).map_err(io("reading"))? {
            let entry = entry.map_err(io("reading"))?;
            if entry.file_name() != LOCK {
                fs::remove_file(entry.path()).map_err(io("clearing"))?;
            }
        }
        Ok(Self { path, _lock: lock })
    }

    /// Writes the manifest, makes all files durable, and renames the folder to its destination in
    /// one step.
    fn finish(self, manifest: &Manifest, dir: &Path) -> Result<(), Failure> {
        let io = |what: &str, path: &Path| {
            let what = format!("{what} {}", path.display());
            move |error: io::Error| unbuilt(what, error)
        };
        let path = self.path.join(MANIFEST);
        let mut file = File::create(&path).map_err(io("writing", &path))?;
        let text = serde_json::to_vec_pretty(manifest).expect("a manifest is plain data");
        file.write_all(&text).map_err(io("writing", &path))?;
        file.sync_all().map_err(io("writing", &path))?;
        // tantivy makes some files readable only for their owner. A service of another user must be
        // able to read them too.
        for entry in fs::read_dir(&self.path).map_err(io("reading", &self.path))? {
            let path = entry.map_err(io("reading", &self.path))?.path();
            let readable = Permissions::from_mode(0o644);
            fs::set_permissions(&path, readable).map_err(io("opening to readers", &path))?;
        }
        sync_folder(&self.path).map_err(io("writing", &self.path))?;
        let flags = if dir.exists() { RenameFlags::RENAME_EXCHANGE } else { RenameFlags::empty() };
        // An existing index is exchanged into the staging folder, which `drop` then removes.
        renameat2(AT_FDCWD, &self.path, AT_FDCWD, dir, flags)
            .map_err(|errno| io("moving to", dir)(errno.into()))?;
        let parent = match dir.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        sync_folder(parent).map_err(io("writing", parent))?;
        let lock = dir.join(LOCK);
        fs::remove_file(&lock).map_err(io("removing", &lock))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            output::warn(&format!("removing {}: {error}", self.path.display()));
        }
    }
}

fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// A complete index, mapped and verified.
pub(crate) struct SearchIndex {
    pub(crate) manifest: Manifest,
    searcher: Searcher,
    analyzer: TextAnalyzer,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Found {
    /// How many documents match.
    pub(crate) hits: u64,
    pub(crate) top: Vec<Hit>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Hit {
    pub(crate) doc: u64,
    pub(crate) score: f32,
    pub(crate) title: String,
}

#[derive(Debug, Error)]
pub(crate) enum SearchError {
    #[error(transparent)]
    Query(#[from] QueryError),
    #[error("the index can't be read: {0}")]
    Index(#[from] tantivy::TantivyError),
}

impl SearchIndex {
    pub(crate) fn open(dir: &Path) -> Result<Self, Failure> {
        let shown = dir.display().to_string();
        let unfinished = |problem: String| {
            let what = format!("{shown} holds no finished index");
            Failure::new(Status::Failed, what, problem, "build one with `elfen-search index`")
        };
        let damaged = |problem: String| {
            let what = format!("the index in {shown} is damaged");
            Failure::new(Status::Failed, what, problem, "build it again")
        };
        let text = fs::read(dir.join(MANIFEST))
            .map_err(|error| unfinished(format!("reading {MANIFEST}: {error}")))?;
        let manifest: Manifest = serde_json::from_slice(&text)
            .map_err(|error| damaged(format!("{MANIFEST}: {error}")))?;
        if manifest.format != FORMAT {
            let found = manifest.format;
            return Err(unfinished(format!("its format is {found}, this program's is {FORMAT}")));
        }
        let index = Index::open_in_dir(dir).map_err(|error| damaged(error.to_string()))?;
        let broken = index.validate_checksum().map_err(|error| damaged(error.to_string()))?;
        if let Some(file) = broken.iter().min() {
            return Err(damaged(format!("{} has a wrong checksum", file.display())));
        }
        let (schema, _) = Fields::schema();
        if index.schema() != schema {
            return Err(damaged("it has unknown or missing fields".to_owned()));
        }
        let reader = index
            .reader_builder()
            // This process never commits, and a watcher would be an additional thread next to the
            // workers.
            .reload_policy(ReloadPolicy::Manual)
            .doc_store_cache_num_blocks(STORE_CACHE_BLOCKS)
            .try_into()
            .map_err(|error| damaged(error.to_string()))?;
        let searcher = reader.searcher();
        if searcher.num_docs() != manifest.documents {
            let (found, expected) = (searcher.num_docs(), manifest.documents);
            return Err(damaged(format!("{found} documents instead of {expected}")));
        }
        let analyzer = index.tokenizers().get(TOKENIZER).expect("every index has it");
        Ok(Self { manifest, searcher, analyzer })
    }

    /// The handles that one thread needs to search.
    pub(crate) fn seeker(&self) -> Seeker {
        Seeker { searcher: self.searcher.clone(), analyzer: self.analyzer.clone() }
    }

    #[cfg(test)]
    pub(super) fn search(&self, query: &str, limit: usize) -> Result<Found, SearchError> {
        self.seeker().search(query, limit, None)
    }
}

/// Searches on the calling thread.
pub(crate) struct Seeker {
    searcher: Searcher,
    analyzer: TextAnalyzer,
}

impl Seeker {
    /// Counts and scores all matches, as the thesis's Lucene does. So the demand of a query depends
    /// on its number of matches. The listener is called during the search.
    pub(crate) fn search(
        &mut self,
        text: &str,
        limit: usize,
        listener: Option<Arc<Mutex<dyn Beat>>>,
    ) -> Result<Found, SearchError> {
        let beats = listener.map(Beats);
        let (_, fields) = Fields::schema();
        let clauses = query::parse(text)?;
        let query = query::build(&clauses, fields.body, &mut self.analyzer)?;
        let best = TopDocs::with_limit(limit.max(1)).order_by_score();
        let (top, hits, _) = self.searcher.search(&query, &(best, Count, beats))?;
        let top = top.into_iter().take(limit).map(|(score, address)| {
            let document: TantivyDocument = self.searcher.doc(address)?;
            let doc = document.get_first(fields.number).and_then(|value| value.as_u64());
            let title = document.get_first(fields.title).and_then(|value| value.as_str());
            Ok(Hit {
                doc: doc.unwrap_or(u64::MAX),
                score,
                title: title.unwrap_or_default().to_owned(),
            })
        });
        Ok(Found { hits: hits as u64, top: top.collect::<tantivy::Result<_>>()? })
    }
}

/// A listener that is called during a search, once per `MATCHES` matches.
///
/// The emulated core must slow a request while it runs, not only afterwards, and its published
/// counts must grow meanwhile. A search is a single call, so its collector calls the listener.
pub(crate) trait Beat: Send {
    fn beat(&mut self);
}

/// In long queries this is about 10 us: a query of the demo has 20,000 matches in 360 us. A beat
/// must cost little in comparison. It costs more while a batch runs, because the batch's accounts
/// and naps must be read. With a beat every 64 matches, this cost alone made requests slower, even
/// if the batch never overlapped them.
const MATCHES: u32 = 512;

/// A collector that only calls the listener.
struct Beats(Arc<Mutex<dyn Beat>>);

impl Collector for Beats {
    type Fruit = ();
    type Child = SegmentBeats;

    fn for_segment(&self, _: SegmentOrdinal, _: &SegmentReader) -> tantivy::Result<Self::Child> {
        Ok(SegmentBeats { listener: self.0.clone(), left: MATCHES })
    }

    fn requires_scoring(&self) -> bool {
        false
    }

    fn merge_fruits(&self, _: Vec<()>) -> tantivy::Result<()> {
        Ok(())
    }
}

struct SegmentBeats {
    listener: Arc<Mutex<dyn Beat>>,
    left: u32,
}

impl SegmentCollector for SegmentBeats {
    type Fruit = ();

    fn collect(&mut self, _: DocId, _: Score) {
        self.left -= 1;
        if self.left == 0 {
            self.left = MATCHES;
            self.listener.lock().beat();
        }
    }

    fn harvest(self) {}
}

#[cfg(test)]
pub(super) mod tests;
