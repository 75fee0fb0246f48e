//! Tests of the documents as a book: every page is in its contents, and links lead somewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::{files, has_extension, root};

const CONTENTS: &str = "docs/SUMMARY.md";
const DOCUMENTS: [&str; 4] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"];

/// The lines of a document outside of its fenced blocks.
fn prose(document: &str) -> impl Iterator<Item = &str> {
    let mut inside = false;
    document.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        inside ^= fence;
        !fence && !inside
    })
}

/// The text without code spans. A link in a code span is an example.
fn without_code(text: &str) -> String {
    text.split('`').step_by(2).collect::<Vec<_>>().join("``")
}

/// The targets of the links and images of a document.
fn links(document: &str) -> Vec<String> {
    let text = without_code(&prose(document).collect::<Vec<_>>().join("\n"));
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets.map(|(target, _)| target.trim().to_owned()).collect()
}

/// A heading as a reader sees it: links are their texts, and code has no backquotes.
fn visible(heading: &str) -> String {
    let mut pieces = heading.split("](");
    let mut seen = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        seen += piece.split_once(')').map_or(piece, |(_, rest)| rest);
    }
    seen
}

/// The anchors of a document by GitHub's rule. A heading is in lower case, without punctuation, and
/// with hyphens for spaces. A repeated heading gets a number.
fn anchors(document: &str) -> BTreeSet<String> {
    let mut seen = BTreeMap::<String, u32>::new();
    let headings = prose(document).filter_map(|line| {
        let text = line.trim_start_matches('#');
        (text.len() < line.len()).then(|| text.strip_prefix(' ')).flatten()
    });
    let anchor = |heading: &str| {
        let heading = visible(heading.trim()).to_lowercase();
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect::<String>()
    };
    let mut number = |anchor: String| {
        let times = seen.entry(anchor.clone()).or_default();
        *times += 1;
        if *times == 1 { anchor } else { format!("{anchor}-{}", *times - 1) }
    };
    headings.map(|heading| number(anchor(heading))).collect()
}

fn is_relative(target: &str) -> bool {
    !target.contains("://") && !target.starts_with("mailto:")
}

/// What is wrong with a relative link of a document: its file or its anchor is missing.
fn broken(document: &Path, target: &str) -> Option<String> {
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let file = match path {
        "" => document.to_owned(),
        _ => document.parent()?.join(path),
    };
    let name = document.strip_prefix(root()).unwrap_or(document).display();
    if !file.exists() {
        return Some(format!("{name}: {target}: there is no such file"));
    }
    if anchor.is_empty() {
        return None;
    }
    let missing = !anchors(&fs::read_to_string(&file).ok()?).contains(anchor);
    missing.then(|| format!("{name}: {target}: there is no such heading"))
}

/// The pages of the book, without its contents.
fn pages() -> Vec<PathBuf> {
    let docs = root().join("docs");
    let pages = files().into_iter().filter(|path| path.starts_with(&docs));
    pages.filter(|path| has_extension(path, &["md"]) && *path != root().join(CONTENTS)).collect()
}

/// Goal: a reader of the book finds every page, once. Method: the links of its contents, compared
/// with the files.
#[test]
fn every_page_is_in_the_contents_once() {
    let contents = fs::read_to_string(root().join(CONTENTS)).expect("the contents");
    let listed = links(&contents);
    let mut wrong = Vec::new();
    for page in pages() {
        let name = page.strip_prefix(root().join("docs")).expect("a page").display().to_string();
        let times = listed.iter().filter(|target| **target == name).count();
        if times != 1 {
            wrong.push(format!("docs/{name} is {times} times in {CONTENTS}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Goal: every relative link leads to a file and a heading. Method: all documents that a reader
/// meets.
#[test]
fn relative_links_lead_somewhere() {
    let readme = |path: &PathBuf| {
        path.ends_with("README.md")
            && path.strip_prefix(root()).is_ok_and(|path| path.components().count() == 2)
    };
    let mut documents = pages();
    documents.extend(DOCUMENTS.iter().chain([&CONTENTS]).map(|name| root().join(name)));
    documents.extend(files().into_iter().filter(readme));
    let mut wrong = Vec::new();
    for document in documents {
        let text = fs::read_to_string(&document).expect("a document");
        let targets = links(&text).into_iter().filter(|target| is_relative(target));
        wrong.extend(targets.filter_map(|target| broken(&document, &target)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Goal: the tests above can fail. Method: links of a document that this test writes.
#[test]
fn broken_links_are_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let document = folder.path().join("page.md");
    let text = "\
# When `doctor` says: no, [again](other.md)

See [here](#steps), [a file](page.md#steps-1), ![figure](missing.svg) and [a
page](https://example.org/#none), but not `[this](that.md)`.

## Steps

```
# no heading, and [no link](nowhere.md)
```

## Steps
";
    fs::write(&document, text).expect("a page");
    let expected = ["when-doctor-says-no-again", "steps", "steps-1"].map(str::to_owned);
    assert_eq!(anchors(text), BTreeSet::from(expected));
    let targets = links(text);
    let expected =
        ["other.md", "#steps", "page.md#steps-1", "missing.svg", "https://example.org/#none"];
    assert_eq!(targets, expected);
    let is_broken = |target: &&String| broken(&document, target).is_some();
    let wrong: Vec<_> = targets.iter().filter(|t| is_relative(t)).filter(is_broken).collect();
    assert_eq!(wrong, ["other.md", "missing.svg"]);
    assert!(broken(&document, "page.md#stops").is_some());
}
