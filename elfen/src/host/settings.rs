//! Settings files: where they lie, and what each line of them sets.
//!
//! A file is flat TOML, `KEY = VALUE` with the names of the command's options. Values come back as the text that the option
//! would take, with the line they stand in; whether an option accepts that text is the option's to say (`cmd::settings`).
//! The user's own file comes first and the machine's last, so that the first answer for a key holds.

use std::env;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

/// A variable that names one file to read instead of the two.
pub(crate) const VARIABLE: &str = "ELFEN_CONFIG";
/// The machine's file.
pub(crate) const MACHINE_FILE: &str = "/etc/elfen/config.toml";
const IN_CONFIG_FOLDER: &str = "elfen/config.toml";

/// A file of settings that is longer than this is no file of settings.
const LONGEST: u64 = 1 << 20;

/// One line of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Setting {
    pub(crate) key: &'static str,
    /// As the option of the same name takes it.
    pub(crate) text: String,
    pub(crate) place: Place,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) file: PathBuf,
    pub(crate) line: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)
    }
}

/// A file that was looked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Looked {
    pub(crate) file: PathBuf,
    pub(crate) found: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Wrong {
    #[error("{error}")]
    Unreadable { file: PathBuf, error: io::Error },
    #[error("it is longer than {LONGEST} bytes")]
    Long { file: PathBuf },
    #[error("{why}")]
    Line { place: Place, why: String },
}

impl Wrong {
    /// The file, with the line if one is to blame.
    pub(crate) fn place(&self) -> String {
        match self {
            Self::Unreadable { file, .. } | Self::Long { file } => file.display().to_string(),
            Self::Line { place, .. } => place.to_string(),
        }
    }
}

/// Everything that the files say, the more personal first.
#[derive(Debug, Default)]
pub(crate) struct Files {
    pub(crate) settings: Vec<Setting>,
    pub(crate) looked: Vec<Looked>,
}

impl Files {
    /// Reads the files of this user and of this machine.
    pub(crate) fn load(keys: &[&'static str]) -> Result<Self, Wrong> {
        let named = env::var_os(VARIABLE).filter(|name| !name.is_empty()).map(PathBuf::from);
        let places = match named {
            Some(file) => vec![(file, true)],
            None => {
                let own = own_file(folder("XDG_CONFIG_HOME"), folder("HOME"));
                own.filter(|file| !is_out_of_reach(file))
                    .into_iter()
                    .chain([PathBuf::from(MACHINE_FILE)])
                    .map(|f| (f, false))
                    .collect()
            }
        };
        Self::read(places, keys)
    }

    /// Of each file, whether it has to be there.
    fn read(places: Vec<(PathBuf, bool)>, keys: &[&'static str]) -> Result<Self, Wrong> {
        let mut files = Self::default();
        for (file, required) in places {
            let text = match text_of(&file) {
                Ok(text) => text,
                Err(Wrong::Unreadable { error, .. }) if !required && is_absent(&error) => {
                    files.looked.push(Looked { file, found: false });
                    continue;
                }
                Err(wrong) => return Err(wrong),
            };
            files.settings.extend(parse(&text, &file, keys)?);
            files.looked.push(Looked { file, found: true });
        }
        Ok(files)
    }

    /// What holds for a key.
    pub(crate) fn get(&self, key: &str) -> Option<&Setting> {
        self.settings.iter().find(|setting| setting.key == key)
    }
}

/// An absolute path in the environment; XDG says to ignore others.
fn folder(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

fn own_file(xdg: Option<PathBuf>, home: Option<PathBuf>) -> Option<PathBuf> {
    let folder = xdg.or_else(|| home.map(|home| home.join(".config")))?;
    Some(folder.join(IN_CONFIG_FOLDER))
}

/// A home that we may not even look into is another user's, left over in HOME: it has no settings for us.
fn is_out_of_reach(file: &Path) -> bool {
    file.metadata().is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

fn is_absent(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENOTDIR)
}

fn text_of(file: &Path) -> Result<String, Wrong> {
    let mut text = String::new();
    let unreadable = |error| Wrong::Unreadable { file: file.to_owned(), error };
    let opened = File::open(file).map_err(unreadable)?;
    opened.take(LONGEST + 1).read_to_string(&mut text).map_err(unreadable)?;
    let long = text.len() as u64 > LONGEST;
    if long { Err(Wrong::Long { file: file.to_owned() }) } else { Ok(text) }
}

fn parse(text: &str, file: &Path, keys: &[&'static str]) -> Result<Vec<Setting>, Wrong> {
    let place = |at: usize| {
        let line = text.bytes().take(at).filter(|&byte| byte == b'\n').count() + 1;
        Place { file: file.to_owned(), line }
    };
    let document = DeTable::parse(text).map_err(|error| Wrong::Line {
        place: place(error.span().map_or(0, |span| span.start)),
        why: format!("it is no TOML: {}", error.message().lines().next().unwrap_or_default()),
    })?;
    let setting = |key: &Spanned<DeString<'_>>, value: &Spanned<DeValue<'_>>| {
        let at = place(key.span().start);
        let key: &str = key.get_ref();
        let known = keys.iter().copied().find(|known| *known == key);
        let Some(known) = known else {
            let why = format!("{key:?} is no setting: possible are {}", keys.join(", "));
            return Err(Wrong::Line { place: at, why });
        };
        match text_of_value(value.get_ref()) {
            Some(text) => Ok(Setting { key: known, text, place: at }),
            None => {
                let found = value.get_ref().type_str();
                let why = format!("{key} is a text in quotation marks, and here is a {found}");
                Err(Wrong::Line { place: at, why })
            }
        }
    };
    document.get_ref().iter().map(|(key, value)| setting(key, value)).collect()
}

/// A text, a decimal number, or a list of texts, which an option takes with commas.
fn text_of_value(value: &DeValue<'_>) -> Option<String> {
    if let Some(list) = value.as_array() {
        let texts: Option<Vec<&str>> = list.iter().map(|item| item.get_ref().as_str()).collect();
        return texts.map(|texts| texts.join(","));
    }
    let whole = value.as_integer().filter(|number| number.radix() == 10);
    let number = whole.map(|number| number.as_str()).or(value.as_float().map(|n| n.as_str()));
    number.or(value.as_str()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEYS: [&str; 3] = ["lanes", "policy", "ref-ipc"];

    fn parsed(text: &str) -> Result<Vec<(&'static str, String, usize)>, String> {
        let settings = parse(text, Path::new("f.toml"), &KEYS);
        let flat = |s: Setting| (s.key, s.text, s.place.line);
        let wrong = |wrong: Wrong| format!("{}: {wrong}", wrong.place());
        settings.map(|settings| settings.into_iter().map(flat).collect()).map_err(wrong)
    }

    /// Goal: each form of a value means the text that the option takes. Method: one of each, with their lines.
    #[test]
    fn values_are_texts_numbers_and_lists() {
        let text =
            "# lanes of this machine\nlanes = [\"0:1\", \"2:3\"]\n\npolicy = 'x'\nref-ipc = 0.9\n";
        let expected = [("lanes", "0:1,2:3", 2), ("policy", "x", 4), ("ref-ipc", "0.9", 5)];
        assert_eq!(parsed(text).unwrap(), expected.map(|(key, text, n)| (key, text.to_owned(), n)));
        assert_eq!(parsed("").unwrap(), []);
    }

    /// Goal: a mistake is told with its file, its line and its key. Method: one of each kind.
    #[test]
    fn mistakes_are_told_with_their_line() {
        let mistakes = [
            (
                "\npolicies = 'x'",
                "f.toml:2: \"policies\" is no setting: possible are lanes, policy",
            ),
            ("policy = true", "f.toml:1: policy is a text in quotation marks, and here is a bool"),
            ("policy = 2026-11-20", "f.toml:1: policy is a text"),
            ("lanes = ['0:1', 2]", "f.toml:1: lanes is a text"),
            ("ref-ipc = 0x10", "f.toml:1: ref-ipc is a text"),
            ("[policy]\nname = 'x'", "f.toml:1: policy is a text"),
            ("policy = 'a'\n\npolicy = 'b'", "f.toml:3: it is no TOML: duplicate key"),
            ("policy = 'a'\nlanes = ", "f.toml:2: it is no TOML: "),
        ];
        for (text, expected) in mistakes {
            let wrong = parsed(text).expect_err(text);
            assert!(wrong.starts_with(expected), "{text:?}: {wrong}");
        }
    }

    /// Goal: the user's file goes before the machine's, and an absent file is none. Method: files in a folder of the test's.
    #[test]
    fn the_first_file_that_says_something_holds() {
        let folder = tempfile::tempdir().unwrap();
        let [own, machine, absent] = ["own", "machine", "no"].map(|name| folder.path().join(name));
        std::fs::write(&own, "policy = 'mine'").unwrap();
        std::fs::write(&machine, "policy = 'theirs'\nlanes = '0:1'").unwrap();
        let places = [absent.clone(), own.clone(), machine].map(|file| (file, false));
        let files = Files::read(places.to_vec(), &KEYS).unwrap();
        let get = |key| files.get(key).map(|setting| setting.text.as_str());
        assert_eq!(
            [get("policy"), get("lanes"), get("ref-ipc")],
            [Some("mine"), Some("0:1"), None]
        );
        assert_eq!(files.looked.iter().map(|l| l.found).collect::<Vec<_>>(), [false, true, true]);
        assert!(Files::read(vec![(absent, true)], &KEYS).is_err(), "a file that was asked for");
        assert!(Files::read(vec![(folder.path().to_owned(), false)], &KEYS).is_err(), "a folder");
        let below_a_file = vec![(own.join("config.toml"), false)];
        assert_eq!(Files::read(below_a_file, &KEYS).unwrap().settings, []);
    }

    #[test]
    fn the_users_file_is_where_xdg_says() {
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(own_file(path("/c"), path("/home/u")), path("/c/elfen/config.toml"));
        assert_eq!(own_file(None, path("/home/u")), path("/home/u/.config/elfen/config.toml"));
        assert_eq!(own_file(None, None), None);
    }

    proptest! {
        /// Goal: no text makes the reader panic, and what it names is a line of the text. Method: any text.
        #[test]
        fn any_text_is_settings_or_a_mistake_in_one_of_its_lines(text in "[a-z='\"\\[\\]\n#é.0-9 -]{0,80}") {
            if let Err(Wrong::Line { place, .. }) = parse(&text, Path::new("f"), &KEYS) {
                prop_assert!(place.line <= text.matches('\n').count() + 1, "{text:?}: {place}");
            }
        }
    }
}
