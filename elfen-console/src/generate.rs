//! The hidden subcommand `generate`: man pages and completions from a command line itself, for
//! packages. Pages have what `--help` prints, in the sections that readers of manuals look for.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};

use crate::failure::{Failure, Status};

/// A section of a command's own page that holds for all its subcommands: rows of two columns, and a
/// paragraph below them.
#[derive(Debug)]
pub struct Section {
    pub heading: &'static str,
    pub rows: Vec<(String, String)>,
    pub note: Option<&'static str>,
}

/// Write man pages or completions into a folder
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:\n  elfen generate man /usr/local/share/man/man1")]
pub struct Args {
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

/// Writes the files of the command `cli`, and prints their paths.
pub fn run(
    args: &Args,
    cli: &Command,
    sections: &[Section],
    out: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    let mut command = visible(cli);
    match args.what {
        What::Man => print(pages(command, sections, &args.folder), &args.folder, out),
        What::Completions => write_completions(&mut command, &args.folder, out),
    }
}

/// Writes completions of `command` for all shells, and prints their paths.
pub fn write_completions(
    command: &mut Command,
    folder: &Path,
    out: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    let name = command.get_name().to_owned();
    let shells = [Shell::Bash, Shell::Zsh, Shell::Fish];
    let write = |shell| clap_complete::generate_to(shell, command, &name, folder);
    print(shells.into_iter().map(write).collect(), folder, out)
}

fn print(
    written: io::Result<Vec<PathBuf>>,
    folder: &Path,
    out: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    let written = written.map_err(|error| {
        let what = format!("writing into {:?}", folder.display().to_string());
        Failure::new(Status::Failed, what, error, "name a folder that can be written")
    })?;
    for path in written {
        writeln!(out, "{}", path.display()).map_err(Failure::output)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The command as users see it: without its hidden subcommands.
fn visible(cli: &Command) -> Command {
    let hidden = Command::is_hide_set;
    let shown: Vec<Command> = cli.get_subcommands().filter(|sub| !hidden(sub)).cloned().collect();
    Command::new(cli.get_name().to_owned())
        .version(env!("CARGO_PKG_VERSION"))
        .about(cli.get_about().cloned().unwrap_or_default())
        .subcommand_required(true)
        .subcommands(shown)
        .disable_help_subcommand(true)
}

fn pages(mut command: Command, sections: &[Section], folder: &Path) -> io::Result<Vec<PathBuf>> {
    command.build();
    let name = command.get_name().to_owned();
    let mut written = Vec::new();
    let rest = top_sections(&command, sections);
    write_page(&command, &name, &rest, folder, &mut written)?;
    for sub in command.get_subcommands() {
        write_pages_of(sub, &format!("{name}-{}", sub.get_name()), folder, &mut written)?;
    }
    Ok(written)
}

/// The page of a subcommand, and those of the subcommands below it.
fn write_pages_of(
    command: &Command,
    name: &str,
    folder: &Path,
    written: &mut Vec<PathBuf>,
) -> io::Result<()> {
    write_page(command, name, &sections_of_help(command), folder, written)?;
    for sub in command.get_subcommands() {
        write_pages_of(sub, &format!("{name}-{}", sub.get_name()), folder, written)?;
    }
    Ok(())
}

fn write_page(
    command: &Command,
    name: &str,
    rest: &Roff,
    folder: &Path,
    written: &mut Vec<PathBuf>,
) -> io::Result<()> {
    let path = folder.join(format!("{name}.1"));
    fs::write(&path, page(command, name, rest)?)?;
    written.push(path);
    Ok(())
}

fn page(command: &Command, name: &str, rest: &Roff) -> io::Result<Vec<u8>> {
    // The page's name has hyphens, its synopsis the words as they are typed.
    let titled = command.clone().display_name(name.to_owned()).disable_help_subcommand(true);
    let man = Man::new(titled);
    let mut page = Vec::new();
    // The empty field is the date: builds of the same sources are identical.
    let (title, version) = (name.to_uppercase(), env!("CARGO_PKG_VERSION"));
    writeln!(page, ".TH {title} 1 \"\" \"elfen {version}\" \"Elfen\"")?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.get_subcommands().next().is_some() {
        man.render_subcommands_section(&mut page)?;
    }
    rest.to_writer(&mut page)?;
    Ok(page)
}

/// What a subcommand's help has after its options: examples verbatim, the rest as paragraphs.
fn sections_of_help(command: &Command) -> Roff {
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

/// What holds for all subcommands, and their list.
fn top_sections(command: &Command, sections: &[Section]) -> Roff {
    let mut roff = Roff::new();
    for section in sections {
        roff.control("SH", [section.heading.to_uppercase().as_str()]);
        for (left, right) in &section.rows {
            roff.control("TP", []);
            roff.text([bold(left.as_str())]);
            roff.text([roman(right.as_str())]);
        }
        if let Some(note) = section.note {
            roff.control("PP", []);
            roff.text([roman(note)]);
        }
    }
    roff.control("SH", ["SEE ALSO"]);
    let top = command.get_name();
    let names = command.get_subcommands().map(|sub| format!("{top}-{}", sub.get_name()));
    let mut list: Vec<Inline> = names.flat_map(|name| [bold(name), roman("(1), ")]).collect();
    list.pop();
    list.push(roman("(1)"));
    roff.text(list);
    roff
}
