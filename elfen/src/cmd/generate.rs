//! `elfen generate`: man pages and completions from the command line itself, for packages.
//!
//! Hidden from help: a packager calls it, and no user needs it. Pages say what `--help` says, in
//! the sections that readers of manuals look for.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};
use elfen_console::failure::{Failure, Status};

use super::help;

/// Write man pages or completions into a folder
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:\n  elfen generate man /usr/local/share/man/man1")]
pub(crate) struct Args {
    what: What,

    /// The folder, which must exist
    folder: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum What {
    /// One page a subcommand, elfen-run.1
    Man,
    /// For bash (elfen.bash), zsh (_elfen) and fish (elfen.fish)
    Completions,
}

pub(crate) fn run(args: &Args, cli: &Command, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let written = match args.what {
        What::Man => man(cli, &args.folder),
        What::Completions => completions(cli, &args.folder),
    };
    let written = written.map_err(|error| {
        let what = format!("writing into {:?}", args.folder.display().to_string());
        Failure::new(Status::Failed, what, error, "name a folder that can be written")
    })?;
    for path in written {
        writeln!(out, "{}", path.display()).map_err(Failure::output)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The command as users see it.
fn visible(cli: &Command) -> Command {
    let hidden = Command::is_hide_set;
    let shown: Vec<Command> = cli.get_subcommands().filter(|sub| !hidden(sub)).cloned().collect();
    let bare = Command::new("elfen")
        .version(env!("CARGO_PKG_VERSION"))
        .about(cli.get_about().cloned().unwrap_or_default())
        .subcommand_required(true);
    bare.subcommands(shown).disable_help_subcommand(true)
}

fn completions(cli: &Command, folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut command = visible(cli);
    let shells = [Shell::Bash, Shell::Zsh, Shell::Fish];
    shells
        .map(|shell| clap_complete::generate_to(shell, &mut command, "elfen", folder))
        .into_iter()
        .collect()
}

fn man(cli: &Command, folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut command = visible(cli);
    command.build();
    let mut written = Vec::new();
    pages(&command, "elfen", folder, &mut written)?;
    Ok(written)
}

/// The page of a command, and those of the subcommands below it.
fn pages(
    command: &Command,
    name: &str,
    folder: &Path,
    written: &mut Vec<PathBuf>,
) -> io::Result<()> {
    let path = folder.join(format!("{name}.1"));
    fs::write(&path, page(command, name)?)?;
    written.push(path);
    for sub in command.get_subcommands() {
        pages(sub, &format!("{name}-{}", sub.get_name()), folder, written)?;
    }
    Ok(())
}

fn page(command: &Command, name: &str) -> io::Result<Vec<u8>> {
    let is_top = name == "elfen";
    // The page's name has hyphens, its synopsis the words that one types;
    // clap's own Display is the name.
    let titled = command.clone().display_name(name.to_owned()).disable_help_subcommand(true);
    let man = Man::new(titled);
    let mut page = Vec::new();
    // The empty field is a date, which a page that is made at each build does not have.
    let (title, version) = (name.to_uppercase(), env!("CARGO_PKG_VERSION"));
    writeln!(page, ".TH {title} 1 \"\" \"elfen {version}\" \"Elfen\"")?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.get_subcommands().next().is_some() {
        man.render_subcommands_section(&mut page)?;
    }
    let rest = if is_top { top_sections(command) } else { sections(command) };
    rest.to_writer(&mut page)?;
    Ok(page)
}

/// What a subcommand's help has after its options: examples as they stand, the rest as paragraphs.
fn sections(command: &Command) -> Roff {
    let mut roff = Roff::new();
    let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let mut heading = "";
    for block in text.trim_end().split("\n\n") {
        let (title, lines) = match block.split_once('\n') {
            Some((first, lines)) if first.starts_with("Example") => ("EXAMPLES", lines),
            _ => ("NOTES", block),
        };
        if block.is_empty() {
            continue;
        }
        if title != heading {
            roff.control("SH", [title]);
            heading = title;
        }
        let verbatim = lines.lines().any(|line| line.starts_with("  "));
        roff.control(if verbatim { "nf" } else { "PP" }, []);
        for line in lines.lines() {
            roff.text([roman(line)]);
        }
        if verbatim {
            roff.control("fi", []);
        }
    }
    roff.control("SH", ["SEE ALSO"]);
    roff.text([bold("elfen"), roman("(1), for exit statuses and variables")]);
    roff
}

/// What holds for all subcommands.
fn top_sections(command: &Command) -> Roff {
    let mut roff = Roff::new();
    for table in help::tables() {
        roff.control("SH", [table.heading.to_uppercase().as_str()]);
        for (left, right) in &table.rows {
            roff.control("TP", []);
            roff.text([bold(left.as_str())]);
            roff.text([roman(right.as_str())]);
        }
        let note = match table.heading {
            "Exit status" => help::FAILURES,
            _ => continue,
        };
        roff.control("PP", []);
        roff.text([roman(note)]);
    }
    roff.control("SH", ["SEE ALSO"]);
    let names = command.get_subcommands().map(|sub| format!("elfen-{}", sub.get_name()));
    let mut list: Vec<Inline> = names.flat_map(|name| [bold(name), roman("(1), ")]).collect();
    list.pop();
    list.push(roman("(1)"));
    roff.text(list);
    roff
}
