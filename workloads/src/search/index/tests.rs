//! Tests complete indexes, and all ways in which an index can be incomplete.

use super::*;

fn build_at(dir: &Path, bodies: &[&str], force: bool) -> Result<Manifest, Failure> {
    let article = |body: &&str| Article { title: "title".to_owned(), body: (*body).to_owned() };
    let articles = bodies.iter().map(article);
    build(articles, u64::MAX, Source::Builtin { seed: 0 }, dir, force)
}

fn why<T>(failed: Result<T, Failure>) -> String {
    failed.err().expect("it fails").to_string()
}

/// Builds an index of these bodies, numbered from 0.
pub(in crate::search) fn index_of(bodies: &[&str]) -> SearchIndex {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let dir = scratch.path().join("index");
    build_at(&dir, bodies, false).expect("a few documents");
    SearchIndex::open(&dir).expect("it was just built")
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("a folder");
    let mut names: Vec<String> =
        entries.map(|e| e.expect("an entry").file_name().into_string().expect("ASCII")).collect();
    names.sort();
    names
}

/// Goal: the best documents come first, with their titles, and all matches are counted. Method:
/// three documents.
#[test]
fn hits_are_ranked() {
    let index = index_of(&["rare common", "common", "common common and much else beside it"]);
    let found = index.search("common rare", 2).expect("a good query");
    assert_eq!((found.hits, found.top.len()), (3, 2));
    assert_eq!((found.top[0].doc, found.top[0].title.as_str()), (0, "title"));
    assert!(found.top[0].score > found.top[1].score);
    assert_eq!(index.search("common", 0).expect("counting alone").hits, 3);
}

/// Goal: the listener is called in proportion to the matches, and does not change the result.
/// Method: a query with 1,600 matches and a query without matches, with a counting listener.
#[test]
fn searches_are_heard_from() {
    struct Count(u32);
    impl Beat for Count {
        fn beat(&mut self) {
            self.0 += 1;
        }
    }
    let index = index_of(&["common"; 1_600]);
    let mut seeker = index.seeker();
    for (query, beats) in [("common", 3), ("absent", 0)] {
        let count = Arc::new(Mutex::new(Count(0)));
        let found = seeker.search(query, 3, Some(count.clone())).expect("a good query");
        assert_eq!(found, seeker.search(query, 3, None).expect("a good query"));
        assert_eq!(count.lock().0, beats, "{query}");
    }
}

/// Goal: an index is replaced only on request, and in one step. No other files remain next to it.
/// Method: build, refuse, replace.
#[test]
fn replacing_must_be_asked_for() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let dir = scratch.path().join("index");
    build_at(&dir, &["one"], false).expect("built");
    assert!(why(build_at(&dir, &["two"], false)).contains("it exists already"));
    assert_eq!(SearchIndex::open(&dir).expect("whole").search("one", 1).expect("good").hits, 1);
    build_at(&dir, &["two"], true).expect("replaced");
    assert_eq!(SearchIndex::open(&dir).expect("whole").search("one", 1).expect("good").hits, 0);
    assert_eq!(names(scratch.path()), ["index"]);
    assert!(!names(&dir).contains(&LOCK.to_owned()));
}

/// Goal: a failed build leaves the existing index and no other files. Method: a build while another
/// one holds the lock, and dropping that other build.
#[test]
fn failed_builds_leave_no_trace() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let dir = scratch.path().join("index");
    build_at(&dir, &["old"], false).expect("built");
    let held = Staging::new(&dir).expect("free");
    assert!(why(build_at(&dir, &["new"], true)).contains("another process"));
    drop(held);
    assert_eq!(names(scratch.path()), ["index"]);
    assert_eq!(SearchIndex::open(&dir).expect("whole").search("old", 1).expect("good").hits, 1);
}

/// Goal: a damaged index is refused, or gives the correct answer if the damage is in unused bytes.
/// It never causes a panic or a wrong answer. Method: every file is truncated at several lengths,
/// then single bytes are changed, then the file is removed.
#[test]
fn damage_is_refused() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let dir = scratch.path().join("index");
    let bodies: Vec<String> = (0..50).map(|n| format!("common word{n} {}", n % 7)).collect();
    let bodies: Vec<&str> = bodies.iter().map(String::as_str).collect();
    build_at(&dir, &bodies, false).expect("built");
    let ask = || -> Result<Found, Failure> {
        let index = SearchIndex::open(&dir)?;
        Ok(index.search("common word7", 10).expect("an opened index answers"))
    };
    let honest = ask().expect("whole");
    let check = |name: &str, what: &str| match ask() {
        Ok(found) => assert_eq!(found, honest, "{name}, {what}"),
        Err(error) => assert!(error.to_string().contains("build"), "{name}, {what}: {error}"),
    };
    let mut refused = 0;
    for name in names(&dir) {
        let path = dir.join(&name);
        let whole = fs::read(&path).expect("readable");
        for part in [0, 1, 2, 3] {
            fs::write(&path, &whole[..whole.len() * part / 4]).expect("writable");
            check(&name, "cut");
            refused += usize::from(ask().is_err());
        }
        for place in (0..whole.len()).step_by(whole.len() / 12 + 1) {
            let mut changed = whole.clone();
            changed[place] ^= 0x10;
            fs::write(&path, &changed).expect("writable");
            check(&name, "changed");
        }
        fs::remove_file(&path).expect("removable");
        check(&name, "removed");
        fs::write(&path, &whole).expect("writable");
    }
    assert!(refused >= 4 * 6, "only {refused} cuts were noticed");
    ask().expect("whole again");
}

/// Goal: equal corpora have equal checksums in all folders, and different corpora have different
/// ones. Method: four builds.
#[test]
fn corpora_have_checksums() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let sum = |name: &str, bodies: &[&str]| {
        build_at(&scratch.path().join(name), bodies, false).expect("built").corpus_checksum
    };
    assert_eq!(sum("a", &["x", "y"]), sum("b", &["x", "y"]));
    assert_ne!(sum("c", &["y", "x"]), sum("d", &["x", "y"]));
}
