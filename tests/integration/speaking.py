"""Scripts in each language, and skips where a host has no tool for one."""

import pytest

from sbx.environments.directory import Environments
from sbx.policy import load
from sbx.protocol.languages import Language
from sbx.runtime.processes.languages import available, how_to_get
from sbx.runtime.settings import Settings


def is_spoken(language: Language) -> bool:
    """Whether sandboxes of the policy `default` run this language here."""
    return language in available(load("default"), Environments(Settings().environments))


def needs_language(language: Language) -> None:
    """Skip the test where they do not."""
    if not is_spoken(language):
        pytest.skip(f"no {language} on this host: {how_to_get(language)}")


# Each sums the numbers of numbers.csv into sum.txt, says hello to its argument and to what it reads
# from its standard input, on both its outputs, and ends with 3.
SUMS: dict[Language, str] = {
    "bash": """
        read -r name
        awk '{ sum += $1 } END { print sum }' numbers.csv > sum.txt
        echo "hello $1 $name"
        echo "$GREETING" >&2
        exit 3
    """,
    "javascript": """
        import fs from 'node:fs';
        const numbers = fs.readFileSync('numbers.csv', 'utf8').trim().split('\\n').map(Number);
        fs.writeFileSync('sum.txt', `${numbers.reduce((a, b) => a + b)}\\n`);
        const name = fs.readFileSync(0, 'utf8').trim();
        console.log(`hello ${process.argv[2]} ${name}`);
        console.error(process.env.GREETING);
        process.exit(3);
    """,
    "java": """
        import java.nio.file.*;
        import java.security.MessageDigest;
        public class Sum {
            record Named(String first, String second) {}
            public static void main(String[] args) throws Exception {
                long sum = 0;
                for (String line : Files.readAllLines(Path.of("numbers.csv")))
                    sum += Long.parseLong(line);
                Files.writeString(Path.of("sum.txt"), sum + "\\n");
                MessageDigest.getInstance("SHA-256");
                var input = new java.util.Scanner(System.in);
                var named = new Named(args[0], input.nextLine());
                System.out.println("hello " + named.first() + " " + named.second());
                System.err.println(System.getenv("GREETING"));
                System.exit(3);
            }
        }
    """,
    "go": """
        package main
        import ("bufio"; "fmt"; "os"; "strconv"; "strings")
        func main() {
            text, err := os.ReadFile("numbers.csv")
            if err != nil { panic(err) }
            sum := 0
            for _, line := range strings.Fields(string(text)) {
                number, _ := strconv.Atoi(line)
                sum += number
            }
            os.WriteFile("sum.txt", []byte(strconv.Itoa(sum) + "\\n"), 0644)
            name, _ := bufio.NewReader(os.Stdin).ReadString('\\n')
            fmt.Println("hello", os.Args[1], strings.TrimSpace(name))
            fmt.Fprintln(os.Stderr, os.Getenv("GREETING"))
            os.Exit(3)
        }
    """,
}
SPOKEN = tuple(SUMS)
