//! Reference pages in Markdown, which `generate` writes: the commands of a program, from their clap
//! definition. The pages in `docs/reference` are committed, and tests compare them with this text.

use std::fmt::Write;

use clap::{Arg, Command};

use crate::paragraph;

/// The columns of a document, except in tables.
const COLUMNS: usize = 120;

/// A page of the reference: its file name and its text.
pub type Page = (&'static str, String);

/// A note for the first lines of generated pages. Markdown does not render it.
pub const GENERATED: &str = "\
<!-- Generated. Update it with SNAPSHOTS=overwrite cargo test --test reference -->\n";

/// The page of a program: its commands with usage, options and examples. `intro` follows the title.
pub fn commands_page(cli: &Command, intro: &str) -> String {
    let mut cli = cli.clone();
    cli.build();
    let name = cli.get_bin_name().unwrap_or(cli.get_name()).to_owned();
    let mut text = format!("{GENERATED}\n# Commands of `{name}`\n\n{}", prose(intro, ""));
    text += "\nEvery command has `-h` for short help and `--help` for all of it.\n";
    let is_command = cli.get_arguments().any(is_shown);
    if is_command || !cli.has_subcommands() {
        add_command(&mut text, &cli, &name);
        add_subcommands(&mut text, &cli, &name);
        return text;
    }
    text += "\n| command | what it does |\n| --- | --- |\n";
    for sub in shown(&cli) {
        let full = format!("{name} {}", sub.get_name());
        let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
        // Writing to a String cannot fail.
        writeln!(text, "| [`{full}`](#{}) | {} |", anchor(&full), marked(&about)).ok();
    }
    add_subcommands(&mut text, &cli, &name);
    text
}

fn add_subcommands(text: &mut String, command: &Command, name: &str) {
    for sub in shown(command) {
        let name = format!("{name} {}", sub.get_name());
        add_command(text, sub, &name);
        add_subcommands(text, sub, &name);
    }
}

fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help")
}

fn is_shown(arg: &Arg) -> bool {
    !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version")
}

fn anchor(heading: &str) -> String {
    heading.replace(' ', "-")
}

fn add_command(text: &mut String, command: &Command, name: &str) {
    let about = command.get_long_about().or(command.get_about());
    let about = about.map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").trim_end();
    let usage: Vec<&str> = usage.lines().map(str::trim).collect();
    *text += &format!("\n## {name}\n\n{}\n```text\n{}\n```\n", prose(&about, ""), usage.join("\n"));
    let links: Vec<String> = shown(command)
        .map(|sub| format!("[`{0}`](#{1}-{0})", sub.get_name(), anchor(name)))
        .collect();
    if !links.is_empty() {
        *text += &format!("\n{}", prose(&format!("Its commands: {}", links.join(", ")), ""));
    }
    let mut headings: Vec<&str> = Vec::new();
    for heading in command.get_arguments().filter(|arg| is_shown(arg)).map(heading_of) {
        if !headings.contains(&heading) {
            headings.push(heading);
        }
    }
    // As in `--help`: arguments, options, then the options of each heading.
    headings.sort_by_key(|heading| match *heading {
        "Arguments" => 0,
        "Options" => 1,
        _ => 2,
    });
    for heading in headings {
        *text += &format!("\n**{heading}**\n\n");
        let args = command.get_arguments().filter(|arg| is_shown(arg));
        args.filter(|arg| heading_of(arg) == heading).for_each(|arg| add_arg(text, arg));
    }
    add_notes(text, command);
}

fn heading_of(arg: &Arg) -> &str {
    let usual = if arg.is_positional() { "Arguments" } else { "Options" };
    arg.get_help_heading().unwrap_or(usual)
}

fn add_arg(text: &mut String, arg: &Arg) {
    let short = arg.get_short().map(|short| format!("`-{short}`, ")).unwrap_or_default();
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string);
    let help = help.unwrap_or_default();
    let mut paragraphs = help.trim().split("\n\n");
    let (first, default) = split_default(paragraphs.next().unwrap_or_default());
    let values: Vec<_> =
        arg.get_possible_values().into_iter().filter(|value| !value.is_hide_set()).collect();
    let explained = values.iter().any(|value| value.get_help().is_some());
    let takes = arg.get_action().takes_values();
    let mut facts = Vec::new();
    if takes && !explained && !values.is_empty() && !arg.is_hide_possible_values_set() {
        let names: Vec<String> =
            values.iter().map(|value| format!("`{}`", value.get_name())).collect();
        facts.push(format!("Values: {}.", names.join(", ")));
    }
    let defaults: Vec<_> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if takes && !defaults.is_empty() && !arg.is_hide_default_value_set() {
        facts.push(format!("Default: `{}`.", defaults.join(",")));
    }
    facts.extend(default.map(|default| format!("D{}.", marked(default))));
    if let Some(variable) = arg.get_env() {
        facts.push(format!("Variable: `{}`.", variable.to_string_lossy()));
    }
    // The form of `--help`, such as `--lanes <PAIRS>`.
    let form = arg.to_string();
    let words = [&[marked(&sentence(first))], &facts[..]].concat().join(" ");
    let line = format!("{short}`{form}`: {words}");
    *text += &format!("- {}\n", wrapped(&line, "  ").trim_end());
    for paragraph in paragraphs {
        *text += &format!("\n  {}", prose(paragraph, "  "));
    }
    if takes && explained {
        for value in values {
            let help = value.get_help().map(ToString::to_string).unwrap_or_default();
            let line = format!("`{}`: {}", value.get_name(), marked(&sentence(&help)));
            *text += &format!("  - {}\n", wrapped(&line, "    ").trim_end());
        }
    }
}

/// Splits off a default that a help text describes at its end, as in `[default: lua5.4 of PATH]`.
/// Returns it without its first letter.
fn split_default(help: &str) -> (&str, Option<&str>) {
    let default = help.strip_suffix(']').and_then(|help| help.rsplit_once(" [d"));
    match default.filter(|(_, default)| default.starts_with("efault")) {
        Some((help, default)) => (help, Some(default)),
        None => (help, None),
    }
}

/// The text below the options: examples and columns verbatim, everything else as paragraphs.
fn add_notes(text: &mut String, command: &Command) {
    let notes = command.get_after_long_help().or(command.get_after_help());
    let notes = notes.map(ToString::to_string).unwrap_or_default();
    for (title, block) in blocks(&notes) {
        if let Some(title) = title {
            *text += &format!("\n**{title}**\n");
        }
        if title.is_some() || block.lines().any(|line| line.starts_with(' ')) {
            let lines: Vec<&str> =
                block.lines().map(|line| line.strip_prefix("  ").unwrap_or(line)).collect();
            *text += &format!("\n```text\n{}\n```\n", lines.join("\n"));
        } else {
            *text += &format!("\n{}", prose(block, ""));
        }
    }
}

/// The blocks of a text after the options. A block that begins with a line like `Examples:` has
/// that title.
pub(crate) fn blocks(text: &str) -> impl Iterator<Item = (Option<&str>, &str)> {
    text.trim_end().split("\n\n").filter(|block| !block.is_empty()).map(|block| {
        match block.split_once(":\n").filter(|(title, _)| !title.contains('\n')) {
            Some((title, lines)) => (Some(title), lines),
            None => (None, block),
        }
    })
}

/// Text of a help as a paragraph of a document. `indent` precedes all lines but the first.
pub fn prose(text: &str, indent: &str) -> String {
    let paragraphs =
        text.trim().split("\n\n").map(|text| wrapped(&marked(&sentence(text)), indent));
    paragraphs.collect::<Vec<_>>().join(&format!("\n{indent}"))
}

/// A help text as a sentence with a full stop.
fn sentence(text: &str) -> String {
    let text = text.trim();
    let ends = text.is_empty() || text.ends_with(['.', ':', '?', '!']);
    if ends { text.to_owned() } else { format!("{text}.") }
}

/// Help text as Markdown: options and variables become code, and no character is markup.
pub fn marked(text: &str) -> String {
    let parts = text.split('`').enumerate().map(|(at, part)| match at % 2 {
        0 => part.split_inclusive(char::is_whitespace).map(marked_word).collect(),
        _ => format!("`{part}`"),
    });
    parts.collect()
}

fn marked_word(word: &str) -> String {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let start = word.find(is_part).unwrap_or(word.len());
    let end = word.rfind(is_part).map_or(start, |at| at + 1);
    let name = &word[start..end];
    let is_option = name.len() > 1
        && name.starts_with('-')
        && name.trim_start_matches('-').starts_with(|c: char| c.is_ascii_alphabetic());
    let is_variable =
        name.contains('_') && name.chars().all(|c| !c.is_ascii_lowercase() && c != '-');
    if is_option || is_variable {
        return format!("{}`{name}`{}", &word[..start], &word[end..]);
    }
    word.chars().fold(String::new(), |mut text, c| {
        if matches!(c, '<' | '*' | '|' | '\\') || (c == '_' && text.is_empty()) {
            text.push('\\');
        }
        text.push(c);
        text
    })
}

/// Breaks a paragraph into lines, none of which Markdown takes for a list or a heading.
fn wrapped(text: &str, indent: &str) -> String {
    let lines = paragraph::wrap(text, COLUMNS - indent.len());
    let is_markup = |line: &str| {
        let word = line.split(' ').next().unwrap_or_default();
        let number = word.trim_end_matches(['.', ')']);
        let numbered = number.len() < word.len() && number.bytes().all(|b| b.is_ascii_digit());
        matches!(word, "-" | "+" | "*" | ">") || numbered || word.starts_with('#')
    };
    let mut text = String::new();
    for (at, line) in lines.iter().enumerate() {
        let escape = if at > 0 && is_markup(line) { "\\" } else { "" };
        let indent = if at > 0 { indent } else { "" };
        text += &format!("{indent}{escape}{line}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the text of a help does not become markup, and its options and variables are code.
    /// Method: a text of each kind.
    #[test]
    fn help_becomes_markdown() {
        assert_eq!(marked("use --lanes (or ELFEN_LANES)"), "use `--lanes` (or `ELFEN_LANES`)");
        assert_eq!(
            marked("a <PID>, `a*b` and a*b, _x_y - 3"),
            "a \\<PID>, `a*b` and a\\*b, \\_x_y - 3"
        );
        assert_eq!(
            wrapped(&format!("{} - b", "a".repeat(119)), ""),
            format!("{}\n\\- b\n", "a".repeat(119))
        );
        assert_eq!(split_default("A [default of b: c]"), ("A", Some("efault of b: c")));
        assert_eq!(split_default("A, B[,...]"), ("A, B[,...]", None));
        assert_eq!(prose("One\n\nTwo.", "  "), "One.\n\n  Two.\n");
    }

    /// Goal: a page has each visible command and option with its default, values and example, and
    /// nothing hidden. Method: a small program.
    #[test]
    fn a_page_has_the_commands_of_a_program() {
        let arg = |name: &'static str| Arg::new(name).long(name).help("How much");
        let sub = Command::new("work")
            .about("Do it")
            .arg(arg("many").short('n').default_value("3").env("IT_MANY"))
            .arg(arg("kind").value_parser(["a", "b"]).help_heading("Expert"))
            .arg(arg("secret").hide(true))
            .after_help("A note.\n\nExample:\n  it work -n 4");
        let cli = Command::new("it").subcommand(sub).subcommand(Command::new("no").hide(true));
        let expected = "\
| [`it work`](#it-work) | Do it |

## it work

Do it.

```text
it work [OPTIONS]
```

**Options**

- `-n`, `--many <many>`: How much. Default: `3`. Variable: `IT_MANY`.

**Expert**

- `--kind <kind>`: How much. Values: `a`, `b`.

A note.

**Example**

```text
it work -n 4
```
";
        let page = commands_page(&cli, "It works.");
        let (intro, commands) = page.split_at(page.find("| [").expect(&page));
        assert_eq!(commands, expected);
        assert!(intro.contains("# Commands of `it`\n\nIt works.\n"), "{intro}");
    }
}
