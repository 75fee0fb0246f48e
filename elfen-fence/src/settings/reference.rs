//! The keys of elfend.toml: the source of the reference page and of the man page. A test compares
//! the keys with the keys of the parser.

use elfen_console::reference::{GENERATED, Page, prose};

/// A table of the file.
struct Table {
    /// The header of the table; empty for the keys above all tables.
    name: &'static str,
    meaning: &'static str,
    keys: &'static [Key],
}

/// A key. Texts between backquotes are code.
struct Key {
    name: &'static str,
    /// The form of its value.
    value: &'static str,
    default: &'static str,
    meaning: &'static str,
}

const REQUIRED: &str = "required";
const NONE: &str = "none";

const INTRO: &str = "\
The file is TOML. `elfend check` reads the file and prints what follows from it. `systemctl reload \
elfend` makes the daemon read it again. An invalid file changes nothing. An unknown key is an error.

A fence needs lanes to run on: at least one `[[service]]` or `[[lent]]` table.";

const TIME: &str = "A TIME is a number with a unit: `500us`, `4ms`, `1.5s`.";

const TABLES: [Table; 4] = [
    Table {
        name: "",
        meaning: "Keys above all tables. They hold for all guards.",
        keys: &[
            Key {
                name: "poll-interval",
                value: "\"TIME\"",
                default: "500us",
                meaning: "How long guards sleep between two polls of a request lane. It bounds \
                          their reaction time.",
            },
            Key {
                name: "timer-slack",
                value: "\"TIME\"",
                default: "4ms",
                meaning: "By how much the kernel may delay a poll on an idle lane to save an \
                          interrupt.",
            },
            Key {
                name: "nap",
                value: "\"KIND\"",
                default: "auto",
                meaning: "How guards wait while they occupy a lane: `auto`, `device`, `umwait`, \
                          `mwaitx` or `spin`. `auto` is the first of these that this machine has.",
            },
            Key {
                name: "source",
                value: "\"SOURCE\"",
                default: "auto",
                meaning: "Where guards learn whether a request lane is busy: `auto`, `tasks` (the \
                          task map by eBPF), `module` (nanonap) or `service` (only the page that \
                          a service publishes).",
            },
            Key {
                name: "metrics",
                value: "\"ADDRESS:PORT\"",
                default: NONE,
                meaning: "Serves metrics for Prometheus at this address. Without this key, elfend \
                          does not listen.",
            },
        ],
    },
    Table {
        name: "service",
        meaning: "A service and the lanes that it lends.",
        keys: &[
            Key {
                name: "name",
                value: "\"NAME\"",
                default: REQUIRED,
                meaning: "The name of the page that the service publishes, if it publishes one.",
            },
            Key {
                name: "lanes",
                value: "\"REQUEST:BATCH,...\"",
                default: REQUIRED,
                meaning: "Pairs of CPUs, as `elfen lanes` prints them.",
            },
            Key {
                name: "user",
                value: "\"USER\"",
                default: "root",
                meaning: "The user that owns the service's page. A page of any other user except \
                          root is ignored.",
            },
            Key {
                name: "policy",
                value: "\"POLICY\"",
                default: "borrow-idle",
                meaning: "`borrow-idle`, `fixed-budget`, `refresh-budget` or `slo-budget`.",
            },
            Key {
                name: "budget",
                value: "\"TIME\"",
                default: NONE,
                meaning: "How long a batch may run next to a request. Required for `fixed-budget` \
                          and `refresh-budget`, and an error for other policies.",
            },
            Key {
                name: "slo",
                value: "\"p99=TIME\"",
                default: NONE,
                meaning: "The latency that the budget must keep. Required for `slo-budget`, and \
                          an error for other policies.",
            },
            Key {
                name: "unit",
                value: "\"UNIT\"",
                default: NONE,
                meaning: "The systemd unit of the service, or a list of units.",
            },
            Key {
                name: "cgroup",
                value: "\"PATH\"",
                default: NONE,
                meaning: "The cgroup of the service, or a list of cgroups, if it is not a unit.",
            },
            Key {
                name: "confine",
                value: "BOOLEAN",
                default: "false",
                meaning: "`true` keeps the service on its request lanes. It requires `unit` or \
                          `cgroup`.",
            },
        ],
    },
    Table {
        name: "lent",
        meaning: "Pairs of CPUs without a service, lent by `borrow-idle`.",
        keys: &[Key {
            name: "lanes",
            value: "\"REQUEST:BATCH,...\"",
            default: REQUIRED,
            meaning: "The pairs.",
        }],
    },
    Table {
        name: "fence",
        meaning: "A cgroup that runs only on batch lanes and below everything else. A fence has \
                  either a `unit` or a `cgroup`.",
        keys: &[
            Key {
                name: "name",
                value: "\"NAME\"",
                default: REQUIRED,
                meaning: "Letters, digits, `-`, `_` and `.`, but not `none`. `elfen run --fence` \
                          and `elfen status` use this name.",
            },
            Key {
                name: "unit",
                value: "\"UNIT\"",
                default: NONE,
                meaning: "A slice, scope or service of systemd, or a pattern with `*`: each unit \
                          that matches is a fence.",
            },
            Key {
                name: "cgroup",
                value: "\"PATH\"",
                default: NONE,
                meaning: "A cgroup as `/proc/PID/cgroup` names it, instead of a unit. elfend \
                          creates it if it does not exist. The last name may have `*`: each \
                          cgroup that matches is a fence. The tier of a kubelet is refused, \
                          because the kubelet could not start. Its pods are accepted.",
            },
            Key {
                name: "lanes",
                value: "\"LIST\"",
                default: "all",
                meaning: "The batch lanes of this fence, such as `16-18`, or `all`.",
            },
        ],
    },
];

const MINIMAL: &str = "\
[[lent]]
lanes = \"0:1\"

[[fence]]
name = \"batch\"
unit = \"elfen.slice\"
";

/// An example with every table, which packages install.
const EXAMPLE: &str = include_str!("../../../packaging/elfend.toml");

/// The page of the reference.
pub fn page() -> Page {
    let mut text = format!("{GENERATED}\n# elfend.toml\n\n");
    text += &prose(
        "The settings of elfend: the lanes that are lent, and the cgroups that are \
                    fences. The default file is `/etc/elfen/elfend.toml`.",
        "",
    );
    text += &format!("\n{}\n{}", prose(INTRO, ""), prose(TIME, ""));
    for Table { name, meaning, keys } in &TABLES {
        let title =
            if name.is_empty() { "Keys of the file".to_owned() } else { format!("`[[{name}]]`") };
        text += &format!("\n## {title}\n\n{}\n", prose(meaning, ""));
        text += "| key | value | default | meaning |\n| --- | --- | --- | --- |\n";
        for Key { name, value, default, meaning } in *keys {
            let default = match *default {
                REQUIRED | NONE => (*default).to_owned(),
                default => format!("`{default}`"),
            };
            text += &format!("| `{name}` | `{value}` | {default} | {meaning} |\n");
        }
    }
    text += &format!("\n## Examples\n\nThe smallest file:\n\n```toml\n{MINIMAL}```\n");
    text += &format!("\nA file with every table:\n\n```toml\n{EXAMPLE}```\n");
    ("elfend-toml.md", text)
}

/// The man page elfend.toml(5).
pub fn man_page() -> String {
    let mut page = ".TH ELFEND.TOML 5 \"\" \"Elfen\" \"File Formats\"\n.SH NAME\n\
                    elfend.toml \\- what elfend lends, and which cgroups are fences\n\
                    .SH SYNOPSIS\n.I /etc/elfen/elfend.toml\n.SH DESCRIPTION\n"
        .to_owned();
    page += &paragraphs(&format!("{INTRO}\n\n{TIME}"));
    for Table { name, meaning, keys } in &TABLES {
        let title =
            if name.is_empty() { "KEYS OF THE FILE".to_owned() } else { format!("[[{name}]]") };
        page += &format!(".SH {title}\n{}", paragraphs(meaning));
        for Key { name, value, default, meaning } in *keys {
            let (name, value) = (roff(name), roff(value));
            page += &format!(".TP\n\\fB{name}\\fR = \\fI{value}\\fR\n{}", paragraphs(meaning));
            page += &match *default {
                NONE => String::new(),
                REQUIRED => "Required.\n".to_owned(),
                default => format!("The default is \\fB{}\\fR.\n", roff(default)),
            };
        }
    }
    page += &format!(".SH EXAMPLES\n.nf\n{}.fi\n.PP\n", roff(MINIMAL));
    page += ".I /usr/share/doc/elfen/examples/elfend.toml\nhas every table.\n.SH SEE ALSO\n\
             .BR elfend (8),\n.BR elfen\\-run (1),\n.BR elfen\\-status (1)\n";
    page
}

/// Paragraphs of text for a man page, with code in bold. A sentence is a line.
fn paragraphs(text: &str) -> String {
    let paragraph = |text: &str| {
        let parts = text.split('`').enumerate().map(|(at, part)| match at % 2 {
            0 => roff(part).replace(". ", ".\n"),
            _ => format!("\\fB{}\\fR", roff(part)),
        });
        parts.collect::<String>() + "\n"
    };
    text.split("\n\n").map(paragraph).collect::<Vec<_>>().join(".PP\n")
}

fn roff(text: &str) -> String {
    text.replace('\\', "\\e").replace('-', "\\-").replace('"', "\\(dq")
}

#[cfg(test)]
mod tests {
    use snapbox::{Assert, Data};

    use super::super::tables::parse;
    use super::*;

    /// Goal: the reference has the keys of the parser, and no other. Method: the keys in the error
    /// about an unknown key, table by table.
    #[test]
    fn the_keys_are_those_of_the_parser() {
        for Table { name, keys, .. } in &TABLES {
            let header = if name.is_empty() { String::new() } else { format!("[[{name}]]") };
            let error = parse(&format!("{header}\nunknown-key = 1\n")).unwrap_err();
            let (_, known) = error.split_once("expected").expect(&error);
            let known = known.split('`').skip(1).step_by(2);
            let mut known: Vec<&str> =
                known.filter(|key| TABLES.iter().all(|table| table.name != *key)).collect();
            // An error about one known key names it only there.
            let mut listed: Vec<&str> = keys.iter().map(|key| key.name).collect();
            known.sort_unstable();
            listed.sort_unstable();
            assert_eq!(known, listed, "[[{name}]]: {error}");
        }
    }

    /// Goal: defaults are those of the parser. Method: a file with each default, and one without.
    #[test]
    fn the_defaults_are_those_of_the_parser() {
        let file = |with_defaults: bool| {
            let mut text = String::new();
            for Table { name, keys, .. } in &TABLES {
                if !name.is_empty() {
                    text += &format!("[[{name}]]\n");
                }
                text += match *name {
                    "service" => "name = \"s\"\nlanes = \"0:1\"\n",
                    "lent" => "lanes = \"2:3\"\n",
                    "fence" => "name = \"f\"\ncgroup = \"x\"\n",
                    _ => "",
                };
                let is_default =
                    |key: &&Key| ![REQUIRED, NONE].contains(&key.default) && key.name != "user";
                for Key { name, value, default, .. } in
                    keys.iter().filter(is_default).filter(|_| with_defaults)
                {
                    let quote = if value.starts_with('"') { "\"" } else { "" };
                    text += &format!("{name} = {quote}{default}{quote}\n");
                }
            }
            format!("{:?}", parse(&text).unwrap_or_else(|why| panic!("{why}: {text}")))
        };
        assert_eq!(file(true), file(false));
    }

    #[test]
    fn the_smallest_example_is_accepted() {
        assert_eq!(parse(MINIMAL).unwrap().fences.len(), 1);
    }

    /// Goal: the man page is that of this table. Method: the packaged file. `SNAPSHOTS=overwrite
    /// cargo test -p elfen-fence` writes it.
    #[test]
    fn the_man_page_is_current() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/man/elfend.toml.5");
        let expected = Data::read_from(file.as_ref(), None);
        let assert = Assert::new().action_env("SNAPSHOTS").normalize_paths(false);
        assert.eq(Data::text(man_page()), expected);
    }
}
