//! Renders a report and parses it as XML, so every test that uses this checks that it is
//! well-formed.

use experiments::report::HtmlReport;
use percent_encoding::percent_decode_str;
use roxmltree::{Document, Node, ParsingOptions};

/// Renders a report, and checks that the result is XML.
pub(crate) fn render(report: &HtmlReport) -> String {
    let html = report.html().expect("all of it can be drawn");
    parse(&html);
    html
}

pub(crate) fn parse(html: &str) -> Document<'_> {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    Document::parse_with_options(html, options).unwrap_or_else(|error| panic!("{error}\n{html}"))
}

/// Returns the elements with this name below a node, in the order of the file.
pub(crate) fn named<'a, 'b>(node: Node<'a, 'b>, name: &'a str) -> Vec<Node<'a, 'b>> {
    node.descendants().filter(|node| node.tag_name().name() == name).collect()
}

/// Returns the elements with this class below a node.
pub(crate) fn of_class<'a, 'b>(node: Node<'a, 'b>, class: &'a str) -> Vec<Node<'a, 'b>> {
    let has = |node: &Node<'a, 'b>| {
        node.attribute("class").is_some_and(|classes| classes.split(' ').any(|one| one == class))
    };
    node.descendants().filter(has).collect()
}

/// Returns the CSV of a figure, as its link contains it, without the heading.
pub(crate) fn csv_of(figure: Node<'_, '_>) -> Vec<Vec<String>> {
    let link = named(figure, "a").into_iter().find_map(|a| a.attribute("download").and(Some(a)));
    let uri = link.expect("every figure has its numbers").attribute("href").expect("a link");
    let coded = uri.strip_prefix("data:text/csv;charset=utf-8,").expect("a data URI");
    let csv = percent_decode_str(coded).decode_utf8().expect("UTF-8");
    assert!(csv.ends_with("\r\n"), "{csv:?}");
    let mut reader = csv::Reader::from_reader(csv.as_bytes());
    assert_eq!(reader.headers().expect("a heading").len(), 6);
    let fields = |row: csv::StringRecord| row.iter().map(str::to_owned).collect();
    reader.records().map(|row| fields(row.expect("six fields"))).collect()
}
