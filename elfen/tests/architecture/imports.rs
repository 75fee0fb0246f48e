//! Finds which files of a crate import from which others, by parsing their text.
//!
//! The line `mod child;` alone is not an import. A path into the child is one, and so is `pub use`.
//! Items under `#[cfg(test)]` are left out: tests may import anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

/// A file, by its module path such as `report::live`. The crate's root has an empty path.
pub(crate) type Module = Vec<String>;

/// The files of a crate, each with the files from which it imports.
pub(crate) struct Imports(BTreeMap<Module, BTreeSet<Module>>);

impl Imports {
    /// Reads the crate with this root file.
    pub(crate) fn of(root: &Path) -> Self {
        let mut files = BTreeMap::new();
        read(root, Module::new(), &mut files);
        Self::between(&files)
    }

    fn between(files: &BTreeMap<Module, Vec<String>>) -> Self {
        let of = |(module, tokens): (&Module, &Vec<String>)| {
            let paths = paths(tokens, &children(tokens));
            let taken = paths.iter().filter_map(|path| resolve(path, module, files));
            (module.clone(), taken.filter(|other| other != module).collect())
        };
        Self(files.iter().map(of).collect())
    }

    /// Each pair of a file and a file from which it imports.
    pub(crate) fn arrows(&self) -> impl Iterator<Item = (&Module, &Module)> {
        self.0.iter().flat_map(|(from, taken)| taken.iter().map(move |to| (from, to)))
    }

    /// The groups of files that import from each other in a cycle.
    pub(crate) fn circles(&self) -> BTreeSet<String> {
        let comes_back = |module: &&Module| self.reachable(module).contains(*module);
        let circle = |module: &Module| {
            let around = self.reachable(module).into_iter();
            let both = around.filter(|other| self.reachable(other).contains(module));
            both.map(name).collect::<Vec<_>>().join(", ")
        };
        self.0.keys().filter(comes_back).map(circle).collect()
    }

    fn reachable<'a>(&'a self, from: &'a Module) -> BTreeSet<&'a Module> {
        let (mut found, mut ahead) = (BTreeSet::new(), vec![from]);
        while let Some(module) = ahead.pop() {
            ahead.extend(self.0[module].iter().filter(|other| found.insert(*other)));
        }
        found
    }
}

pub(crate) fn name(module: &Module) -> String {
    if module.is_empty() { "the root".to_owned() } else { module.join("::") }
}

/// Reads a file, and the files of the modules that it declares.
fn read(file: &Path, module: Module, files: &mut BTreeMap<Module, Vec<String>>) {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    let tokens = without_tests(tokens(&text));
    let folder = file.parent().expect("a folder");
    let stem = file.file_stem().expect("a name");
    let beside = module.is_empty() || stem == "mod";
    let folder = if beside { folder.to_owned() } else { folder.join(stem) };
    for child in children(&tokens) {
        let places = [folder.join(format!("{child}.rs")), folder.join(&child).join("mod.rs")];
        let place = places.iter().find(|place| place.exists());
        let place = place.unwrap_or_else(|| panic!("{file:?}: where is {child}?"));
        read(place, [&module[..], &[child]].concat(), files);
    }
    files.insert(module, tokens);
}

/// The tokens of a text: words, `::`, and single signs. Comments and literals are left out.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    flatten(text.parse().expect("Rust"), &mut tokens);
    tokens
}

fn flatten(stream: TokenStream, tokens: &mut Vec<String>) {
    let mut first_colon = false;
    for tree in stream {
        let second_colon = std::mem::take(&mut first_colon);
        match tree {
            TokenTree::Ident(word) => tokens.push(word.to_string()),
            TokenTree::Literal(_) => {}
            TokenTree::Punct(sign) if sign.as_char() == ':' && second_colon => {
                tokens.pop();
                tokens.push("::".to_owned());
            }
            TokenTree::Punct(sign) => {
                first_colon = sign.as_char() == ':' && sign.spacing() == Spacing::Joint;
                tokens.push(sign.to_string());
            }
            TokenTree::Group(group) => {
                let (opens, closes) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                tokens.push(opens.to_owned());
                flatten(group.stream(), tokens);
                tokens.push(closes.to_owned());
            }
        }
    }
}

/// Leaves out items that exist only in tests and models.
fn without_tests(tokens: Vec<String>) -> Vec<String> {
    let mut kept: Vec<String> = Vec::new();
    let mut rest = &tokens[..];
    while let Some((first, after)) = rest.split_first() {
        let attribute: Vec<&str> = rest.iter().take(16).map(String::as_str).collect();
        let is_of_tests = match attribute.as_slice() {
            ["#", "[", "cfg", "(", inside @ ..] => {
                let inside = inside.split(|token| *token == "]").next().unwrap_or_default();
                inside.contains(&"test") && !inside.contains(&"not")
            }
            _ => false,
        };
        if is_of_tests {
            let end = rest.iter().position(|token| token == "]").map_or(rest.len(), |at| at + 1);
            rest = &rest[end + item(&rest[end..])..];
        } else {
            kept.push(first.clone());
            rest = after;
        }
    }
    kept
}

/// The length of the item at the beginning of the tokens: up to its semicolon or closing brace.
fn item(tokens: &[String]) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match token.as_str() {
            "{" => depth += 1,
            "}" if depth == 1 => return at + 1,
            "}" => depth -= 1,
            ";" if depth == 0 => return at + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// The child modules that a file declares.
fn children(tokens: &[String]) -> Vec<String> {
    let declared = tokens.windows(3).filter(|t| t[0] == "mod" && t[2] == ";");
    declared.map(|t| t[1].clone()).collect()
}

/// Every path that leads into this crate.
fn paths(tokens: &[String], children: &[String]) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let begins = ["crate", "super", "self"].contains(&tokens[at].as_str())
            || children.contains(&tokens[at]);
        let before = at.checked_sub(1).map_or("", |before| tokens[before].as_str());
        let ours = begins && !["::", ".", "$", "mod", "fn"].contains(&before);
        if before == "use" || (ours && tokens.get(at + 1).is_some_and(|next| next == "::")) {
            at += tree(&tokens[at..], &[], &mut paths).max(1);
        } else {
            at += 1;
        }
    }
    let known = ["crate", "super", "self"];
    paths.retain(|path: &Vec<String>| {
        path.first()
            .is_some_and(|first| known.contains(&first.as_str()) || children.contains(first))
    });
    paths
}

/// Adds a path, which may branch in braces. Returns how many tokens it takes.
fn tree(tokens: &[String], above: &[String], paths: &mut Vec<Vec<String>>) -> usize {
    let mut path = above.to_vec();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        match token.as_str() {
            "::" => at += 1,
            "{" => {
                at += 1;
                while let Some(token) = tokens.get(at).filter(|token| *token != "}") {
                    at += match token.as_str() {
                        "," => 1,
                        "as" => 2,
                        _ => tree(&tokens[at..], &path, paths).max(1),
                    };
                }
                return at + 1;
            }
            word if word.starts_with(|c: char| c.is_alphanumeric() || c == '_') => {
                // The path of `a as b` is `a`.
                if at > 0 && tokens[at - 1] != "::" {
                    break;
                }
                path.push(word.to_owned());
                at += 1;
            }
            _ => break,
        }
    }
    paths.push(path);
    at
}

/// The file that a path leads to.
fn resolve(
    path: &[String],
    from: &Module,
    files: &BTreeMap<Module, Vec<String>>,
) -> Option<Module> {
    let mut words = path.iter().map(String::as_str).peekable();
    let mut at = from.clone();
    match words.peek().copied() {
        Some("crate") => {
            at.clear();
            words.next();
        }
        Some("self") => {
            words.next();
        }
        Some("super") => {
            while words.next_if_eq(&"super").is_some() {
                at.pop()?;
            }
        }
        _ => {}
    }
    for word in words {
        at.push(word.to_owned());
        if !files.contains_key(&at) {
            at.pop();
            break;
        }
    }
    Some(at)
}

/// A made-up crate: modules with their text.
pub(crate) fn made_up(files: &[(&str, &str)]) -> Imports {
    let module =
        |name: &str| name.split("::").filter(|n| !n.is_empty()).map(str::to_owned).collect();
    let file = |(name, text): &(&str, &str)| (module(name), without_tests(tokens(text)));
    Imports::between(&files.iter().map(file).collect())
}
