//! The hidden subcommand `generate`, for packages and for `docs/reference`: writes man pages,
//! completions and reference pages from the clap definition of a command. A man page has the
//! content of `--help`, in the usual sections.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};

use crate::failure::{Failure, Status};
use crate::reference::{Page, blocks};

/// Write man pages, completions or the reference into a folder
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:\n  elfen generate man /usr/local/share/man/man1")]
pub struct GenerateArgs {
    what: What,

    /// The folder, which must exist
    folder: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum What {
    /// One page for each subcommand, such as elfen-run.1
    Man,
    /// For bash (elfen.bash), zsh (_elfen) and fish (elfen.fish)
    Completions,
    /// The pages of docs/reference
    Reference,
}

/// Writes the files of the command `cli`, and prints their paths. `reference` makes the pages of
/// its reference.
pub fn run(
    args: &GenerateArgs,
    cli: &Command,
    reference: impl FnOnce(&Command) -> Vec<Page>,
    out: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    match args.what {
        What::Man => print(pages(visible(cli), &args.folder), &args.folder, out),
        What::Completions => write_completions(&mut visible(cli), &args.folder, out),
        What::Reference => write_reference(&reference(cli), &args.folder, out),
    }
}

/// Writes pages of the reference, and prints their paths.
pub fn write_reference(
    pages: &[Page],
    folder: &Path,
    out: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    let write = |(name, text): &Page| {
        let path = folder.join(name);
        fs::write(&path, text).map(|()| path)
    };
    print(pages.iter().map(write).collect(), folder, out)
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

/// The command without its hidden subcommands.
fn visible(cli: &Command) -> Command {
    let hidden = Command::is_hide_set;
    let shown: Vec<Command> = cli.get_subcommands().filter(|sub| !hidden(sub)).cloned().collect();
    Command::new(cli.get_name().to_owned())
        .version(env!("CARGO_PKG_VERSION"))
        .about(cli.get_about().cloned().unwrap_or_default())
        .after_help(cli.get_after_long_help().or(cli.get_after_help()).cloned().unwrap_or_default())
        .subcommand_required(true)
        .subcommands(shown)
        .disable_help_subcommand(true)
}

fn pages(mut command: Command, folder: &Path) -> io::Result<Vec<PathBuf>> {
    command.build();
    let mut written = Vec::new();
    let names =
        command.get_subcommands().map(|sub| format!("{}-{}", command.get_name(), sub.get_name()));
    let see_also: Vec<String> = names.collect();
    let name = command.get_name().to_owned();
    write_pages_of(&command, &name, &see_also, folder, &mut written)?;
    Ok(written)
}

/// Writes the page of a command, and the pages of its subcommands.
fn write_pages_of(
    command: &Command,
    name: &str,
    see_also: &[String],
    folder: &Path,
    written: &mut Vec<PathBuf>,
) -> io::Result<()> {
    let path = folder.join(format!("{name}.1"));
    fs::write(&path, page(command, name, &sections(command, see_also))?)?;
    written.push(path);
    for sub in command.get_subcommands() {
        let name = format!("{name}-{}", sub.get_name());
        write_pages_of(sub, &name, &["elfen".to_owned()], folder, written)?;
    }
    Ok(())
}

fn page(command: &Command, name: &str, rest: &Roff) -> io::Result<Vec<u8>> {
    // The page's name has hyphens; its synopsis has the words as they are typed.
    let titled = command.clone().display_name(name.to_owned()).disable_help_subcommand(true);
    let man = Man::new(titled);
    let mut page = Vec::new();
    // The date is empty, so that builds of the same sources are identical.
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

/// Turns the help text after the options into sections. A block that begins with a line like
/// `Examples:` is a section of that name, verbatim. All other blocks are paragraphs.
fn sections(command: &Command, see_also: &[String]) -> Roff {
    let mut roff = Roff::new();
    let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let mut heading = String::new();
    for (titled, lines) in blocks(&text) {
        let title = titled.unwrap_or("Notes");
        let title = if title == "Example" { "Examples" } else { title };
        if title != heading {
            roff.control("SH", [title.to_uppercase().as_str()]);
            heading = title.to_owned();
        }
        roff.control(if titled.is_some() { "nf" } else { "PP" }, []);
        for line in lines.lines() {
            roff.text([roman(line)]);
        }
        if titled.is_some() {
            roff.control("fi", []);
        }
    }
    roff.control("SH", ["SEE ALSO"]);
    let mut names: Vec<Inline> =
        see_also.iter().flat_map(|name| [bold(name.as_str()), roman("(1), ")]).collect();
    names.pop();
    names.push(roman("(1)"));
    roff.text(names);
    roff
}
